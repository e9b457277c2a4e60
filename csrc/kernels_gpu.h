// The Triton kernels as the launcher knows them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

namespace fastddp {

enum class Form { pack, unpack };

// What kernels/ahead_of_time.py says of a kernel that it compiled.
struct CompiledKernel {
  std::string name;
  std::string cubin;
  unsigned warps;
  unsigned shared_bytes;
  int64_t chunk_elements;
  size_t scratch_parameters;
};

// Loads pack or unpack for gradients and wire of these dtypes onto the device. Raises where there is no CUDA driver.
void load_kernel(c10::Device device, Form form, c10::ScalarType gradient, c10::ScalarType wire,
                 const CompiledKernel& kernel);

bool has_kernel(c10::Device device, Form form, c10::ScalarType gradient, c10::ScalarType wire);

}  // namespace fastddp
