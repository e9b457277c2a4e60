// The tables that tell the Triton kernels where the elements of a bucket are; kernels/pack_kernels.py says what each
// word means.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "device/device_table.h"
#include "pack/kernels.h"

namespace fastddp {

// Both tables on the host.
class TableWords {
 public:
  // Adds the slot to the tables. Returns false if the kernels cannot move it, so that torch's operators have to. The kernels do
  // not take: another dtype than the slots before it, lazily conjugated or negated values, complex numbers that do not lie as in
  // the wire, a view with gaps, and, if they write gradients (`writable`), a gradient whose elements may share memory.
  bool add(const Slot& slot, bool writable);

  // After the last slot. wire(): the address from which rows count elements.
  const void* wire() const { return wire_; }
  Words addresses() const;
  Words chunks(int64_t chunk_elements) const;
  // How many chunks each slot has. Slots without elements are left out.
  Words chunk_counts(int64_t chunk_elements) const {
    Words counts;
    for (const auto& row : rows_) counts.push_back((row.count + chunk_elements - 1) / chunk_elements);
    return counts;
  }
  // Equal for two sets of slots exactly if their chunks are equal.
  Words places() const;

  bool empty() const { return rows_.empty(); }
  // The gradients' dtype; the wire's, if all gradients are undefined.
  c10::ScalarType gradient_dtype() const {
    return gradient_dtype_ == c10::ScalarType::Undefined ? wire_dtype_ : gradient_dtype_;
  }
  c10::ScalarType wire_dtype() const { return wire_dtype_; }

 private:
  struct Row {
    int64_t address;     // of the gradient; 0 if undefined
    int64_t shape;       // where its shape block begins among all blocks, or -1
    const char* target;  // its place in the wire
    int64_t count;       // of elements; complex numbers are pairs
  };

  std::vector<Row> rows_;
  Words blocks_;
  const char* wire_ = nullptr;
  c10::ScalarType wire_dtype_ = c10::ScalarType::Undefined;
  c10::ScalarType gradient_dtype_ = c10::ScalarType::Undefined;
};

// Both tables on the device.
class AddressTable {
 public:
  AddressTable(c10::Device device, const CudaDriver& driver) : addresses_(device, driver), chunks_(device, driver) {}

  struct Tables {
    at::Tensor addresses;
    at::Tensor chunks;
    unsigned programs;
  };
  // Brings the tables up to date for `words`, in the order of the current stream.
  Tables refresh(const TableWords& words, int64_t chunk_elements);

  size_t uploads() const { return addresses_.uploads() + chunks_.uploads(); }

 private:
  DeviceTable addresses_;
  DeviceTable chunks_;
};

}  // namespace fastddp
