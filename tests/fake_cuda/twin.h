// The pack and unpack kernels on host memory.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace fake_cuda {

// The arguments of a launch, as kernels/pack_kernels.py lists them.
struct Launch {
  std::string kernel;  // fastddp_pack_fp32_to_bf16, fastddp_unpack_bf16_to_fp32, ...
  char* wire;
  const int64_t* table;
  const int64_t* chunks;
  double scale;
  unsigned programs;
  c10::DeviceIndex device;
};

// Raises if there is no twin of that name.
void check_name(const std::string& kernel);

// Decodes the tables and moves the elements, chunk by chunk in a shuffled order. Raises "illegal memory access" where the
// tables point outside of memory of the device.
void execute(const Launch& launch);

}  // namespace fake_cuda
