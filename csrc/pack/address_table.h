// The tables that tell the Triton kernels where the elements of a bucket are; kernels/pack_kernels.py says what each
// word means.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "device/device_table.h"
#include "pack/kernels.h"

namespace fastddp {

// Both tables of one call, on the host.
class TableWords {
 public:
  // Takes the slots that the kernels can move. They do not take: another dtype than the slots before it, lazily conjugated or
  // negated values, complex numbers that do not lie as in the wire, a view with gaps, and, if they write gradients (`writable`),
  // a gradient whose elements may share memory.
  TableWords(const std::vector<Slot>& slots, bool writable);

  // The other slots, which are left to torch's operators.
  const std::vector<Slot>& rest() const { return rest_; }

  // wire(): the address from which rows count elements.
  const void* wire() const { return wire_; }
  Words addresses() const;
  static constexpr int64_t kChunkWords = 4;
  Words chunks(int64_t chunk_elements) const;
  // How many chunks each slot has, by its member. Slots without elements are left out.
  std::vector<std::pair<size_t, int64_t>> chunk_counts(int64_t chunk_elements) const;
  // Equal for two sets of slots exactly if their chunks are equal.
  Words places() const;

  bool empty() const { return rows_.empty(); }
  // The gradients' dtype; the wire's, if all gradients are undefined.
  c10::ScalarType gradient_dtype() const {
    return gradient_dtype_ == c10::ScalarType::Undefined ? wire_dtype_ : gradient_dtype_;
  }
  c10::ScalarType wire_dtype() const { return wire_dtype_; }

 private:
  bool add(const Slot& slot, bool writable);

  struct Row {
    int64_t address;     // of the gradient; 0 if undefined
    int64_t shape;       // where its shape block begins among all blocks, or -1
    const char* target;  // its place in the wire
    int64_t count;       // of elements; complex numbers are pairs
    size_t member;
  };

  std::vector<Row> rows_;
  std::vector<Slot> rest_;
  Words blocks_;
  const char* wire_ = nullptr;
  c10::ScalarType wire_dtype_ = c10::ScalarType::Undefined;
  c10::ScalarType gradient_dtype_ = c10::ScalarType::Undefined;
};

}  // namespace fastddp
