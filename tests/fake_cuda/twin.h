// The kernels on host memory: what kernels/pack_kernels.py, low_rank_kernels.py, orthogonalise_kernels.py,
// block8_kernels.py and sum_shards_kernels.py say.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <bit>

#include "device.h"

namespace fake_cuda {

inline c10::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, c10::ScalarType> dtypes{
      {"fp32", at::kFloat}, {"fp16", at::kHalf}, {"bf16", at::kBFloat16}, {"fp64", at::kDouble}};
  return dtypes.at(name);
}

inline int64_t size_of(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// A launch: the arguments as the kernel's module lists them, scratch pointers left out.
struct Launch {
  std::string kernel;
  std::vector<uint64_t> values;
  unsigned programs;
  c10::DeviceIndex device;

  template <typename T>
  T* pointer(size_t index) const {
    return reinterpret_cast<T*>(values.at(index));
  }
  double real(size_t index) const { return std::bit_cast<double>(values.at(index)); }
  int64_t integer(size_t index) const { return std::bit_cast<int64_t>(values.at(index)); }

  // Raises if `bytes` bytes from there on are not memory of the device.
  void check(const void* address, int64_t bytes) const {
    TORCH_CHECK(bytes == 0 || is_mapped(address, static_cast<size_t>(bytes), device), "illegal memory access: kernel ", kernel,
                " touches ", bytes, " bytes at ", address, ", which are not memory of device ", static_cast<int>(device));
  }
  // Row `number` of the table at which an argument points.
  template <typename Row>
  const Row& row(size_t table, int64_t number) const {
    const auto* found = pointer<const Row>(table) + number;
    check(found, sizeof(Row));
    return *found;
  }
  // Elements from `address` on.
  at::Tensor elements(void* address, int64_t count, c10::ScalarType dtype) const {
    check(address, count * size_of(dtype));
    return at::from_blob(address, {count}, dtype);
  }
  // The pair of a program (a sum of squares, and how many are not finite), in the table at which an argument points.
  at::Tensor pair(size_t table, int64_t program) const {
    return elements(pointer<double>(table) + 2 * program, 2, at::kDouble);
  }
};

struct Twin {
  size_t parameters;  // all of 8 bytes, without scratch pointers
  // One program of the launch; programs run in a shuffled order.
  std::function<void(const Launch&, int64_t program)> run;
};

// Null if there is none of this name.
std::optional<Twin> pack_twin(const std::string& kernel);
std::optional<Twin> low_rank_twin(const std::string& kernel);
std::optional<Twin> basis_twin(const std::string& kernel);
std::optional<Twin> block8_twin(const std::string& kernel);

// How many chunks pack and unpack have moved element by element, because one of their ends was not aligned.
inline std::atomic<size_t> chunks_by_element{0};

}  // namespace fake_cuda
