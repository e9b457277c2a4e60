// The memory that travels, and who refers to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "bucket/wire_memory.h"

namespace fastddp {

// Note [Lent wires]
// A wire in which no gradients live is needed only during a window. With lazy_bucket_allocation such a wire is made when a window
// needs it, and goes back to the allocator when the window has ended; on the CPU, when its bucket is finished. So does every wire of
// sharded gradients: the rank's run is copied out first. The forward and the optimizer can use the memory. The caller's stream has
// waited for all that used the wire (note [Kept until the join], device/streams.h). So the memory can be given out again on that
// stream at once, however far the device lags behind.
// A captured graph is replayed on the memory that it was captured with. So wires are kept once a window has been captured.

// One-dimensional. It is planned once, and made when a window first needs it. It can tell its own references to its memory from
// others: note [Aliases of a wire].
class Wire {
 public:
  struct Need {
    c10::ScalarType dtype;
    c10::Device device;
    int64_t elements;
    bool has_beside = false;      // as much memory beside it: for the ranks' sum, or room for what they send
    WireMemory memory = nullptr;  // null: the allocator's
    bool operator==(const Need& other) const {
      return dtype == other.dtype && device == other.device && elements == other.elements;
    }
  };
  // Says what make() makes; none: nothing travels in it. Another need than before gives back what there is.
  void plan(std::optional<Need> need);
  const std::optional<Need>& need() const { return need_; }
  bool is_planned() const { return need_.has_value(); }

  bool exists() const { return tensor_.defined(); }
  // Cuts `parts` out of a wire.
  using CutUp = std::function<std::vector<at::Tensor>(const at::Tensor& wire)>;
  // Makes it, uninitialised but for what `cut_up` writes: the caller fills it.
  void make(const CutUp& cut_up = nullptr);
  const at::Tensor& tensor() const { return tensor_; }
  // The tensor itself, unless it is beside.
  const at::Tensor& sum() const { return sum_; }
  // What its writer has cut out of it, to cut it once. They go when the wire goes.
  std::vector<at::Tensor> parts;
  bool has(const at::Tensor& gradient) const { return exists() && gradient.defined() && gradient.is_alias_of(tensor_); }

  // Ordinary memory in its place: note [Memory of wires], wire_memory.h. Uninitialised.
  at::Tensor another() const;
  // Takes this memory: a part of another wire, which knows who holds it; or what another() has made, and the memory before is left to
  // whoever holds it.
  void become(const at::Tensor& tensor, const CutUp& cut_up = nullptr);
  // Gives its memory back; gradients that live there keep it.
  void give_back();

  // Note [Aliases of a wire]
  // Parts of the wire travel as tensors of their own, and process groups may hold them for longer than we do. The wire remembers
  // each of them weakly, so that those that are still alive do not pass for gradients that somebody keeps. A tensor of other
  // memory is not remembered.
  void lend(const at::Tensor& alias);
  // Whether its memory has references beyond its own and `known` others.
  bool is_held_beside(size_t known) const;

 private:
  std::optional<Need> need_;
  at::Tensor tensor_;
  at::Tensor sum_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> aliases_;
};

}  // namespace fastddp
