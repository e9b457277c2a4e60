// Restores what a codec remembered: note [What is remembered for good], codec.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/where.h>

#include <utility>
#include <vector>

#include "device/streams.h"

namespace fastddp {

// Note [Errors change places]
// Errors have two buffers. The first encode of a step reads the errors from one and writes what it leaves out to the other, so
// nothing is copied, and undo() has only to let the two change places again. All tensors that share a buffer's storage, such as
// those of a state in Python, follow it. A captured graph is replayed on the addresses of its capture. So a codec of which a step
// was captured copies errors from then on, and its buffers stay where they are. PowerSGD's Q is kept alike.

// The storages of `a` and `b` exchange their memory. False, and nothing happens: they are not the whole of two equal storages.
inline bool change_places(const at::Tensor& a, const at::Tensor& b) {
  const auto is_whole = [](const at::Tensor& tensor) {
    return tensor.storage_offset() == 0 && tensor.storage().nbytes() == static_cast<size_t>(tensor.nbytes());
  };
  if (!is_whole(a) || !is_whole(b) || a.nbytes() != b.nbytes()) return false;
  std::swap(a.storage().unsafeGetStorageImpl()->mutable_data_ptr(), b.storage().unsafeGetStorageImpl()->mutable_data_ptr());
  return true;
}

// What the tensors hold is kept elsewhere, where undo_change() finds it: they change places, or are copied by copy_rest().
class Keeping {
 public:
  // `is_captured`: a step was captured.
  explicit Keeping(bool is_captured) : is_captured_(is_captured) {}

  // Where it is from here on: in one of the two.
  const at::Tensor& add(const at::Tensor& now, const at::Tensor& kept) {
    if (!is_captured_ && change_places(now, kept)) return kept;
    now_.push_back(now);
    kept_.push_back(kept);
    return now;
  }
  void copy_rest() {
    if (!kept_.empty()) at::_foreach_copy_(kept_, now_);
  }

 private:
  const bool is_captured_;
  std::vector<at::Tensor> now_, kept_;
};

// memory = kept, by a copy; `only_if` as in Codec::undo().
inline void bring_back(const at::Tensor& memory, const at::Tensor& kept, const at::Tensor& only_if) {
  for (const auto& tensor : {memory, kept}) {
    // Orders no gradients.
    keep_for_current_stream(tensor);
  }
  memory.copy_(only_if.defined() ? at::where(only_if.to(memory.device()).ne(0), kept, memory) : kept);
}

// now = kept, in either way. `is_captured`: a step was captured.
inline void undo_change(const at::Tensor& now, const at::Tensor& kept, const at::Tensor& only_if, bool is_captured) {
  if (only_if.defined() || is_captured || !change_places(now, kept)) bring_back(now, kept, only_if);
}

}  // namespace fastddp
