// The tables that tell the Triton kernels where the elements of a bucket are; kernels/pack_kernels.py says what each
// word means.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "cuda_driver.h"
#include "kernels.h"

namespace fastddp {

// Both tables on the host.
class TableWords {
 public:
  // Takes the slot into the tables; false if the kernels cannot move it and torch's operators have to: another dtype
  // than the slots before it, lazily conjugated or negated values, complex numbers that do not lie as in the wire, and,
  // for kernels that write gradients (`writable`), a gradient whose elements share memory.
  bool add(const Slot& slot, bool writable);

  // After the last slot. `wire`: the address that rows count elements from.
  const void* wire() const {
    return wire_;
  }
  std::vector<int64_t> addresses() const;
  std::vector<int64_t> chunks(int64_t chunk_elements) const;
  // Equal for two sets of slots exactly if their chunks are.
  std::vector<int64_t> places() const;

  bool empty() const {
    return rows_.empty();
  }
  // Of the gradients; where all are undefined, of the wire.
  c10::ScalarType gradient_dtype() const;
  c10::ScalarType wire_dtype() const {
    return wire_dtype_;
  }

 private:
  struct Row {
    int64_t address;     // of the gradient; 0 if undefined
    int64_t shape;       // where its shape block begins among all blocks, or -1
    const char* target;  // its place in the wire
    int64_t count;       // of elements; complex numbers are pairs
  };

  std::vector<Row> rows_;
  std::vector<int64_t> blocks_;
  const char* wire_ = nullptr;
  c10::ScalarType wire_dtype_ = c10::ScalarType::Undefined;
  c10::ScalarType gradient_dtype_ = c10::ScalarType::Undefined;
};

// Both tables on the device. Each goes up from pinned memory when it has changed, so in a steady state nothing does.
class AddressTable {
 public:
  AddressTable(c10::Device device, const CudaDriver& driver) : device_(device), driver_(driver) {}

  struct Tables {
    at::Tensor addresses;
    at::Tensor chunks;
    unsigned programs;
  };
  // Up to date for `words`, in the order of the current stream.
  Tables refresh(const TableWords& words, int64_t chunk_elements);

  size_t uploads() const {
    return uploads_;
  }

 private:
  struct Table {
    std::vector<int64_t> words;
    at::Tensor on_device;
  };

  at::Tensor upload(const std::vector<int64_t>& words);

  c10::Device device_;
  const CudaDriver& driver_;
  Table addresses_;
  Table chunks_;
  std::vector<int64_t> places_;   // that `chunks_` is of
  std::vector<at::Tensor> kept_;  // note [Tables of a captured graph]
  size_t uploads_ = 0;
};

}  // namespace fastddp
