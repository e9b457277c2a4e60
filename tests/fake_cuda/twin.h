// The pack and unpack kernels on host memory: what kernels/pack_kernels.py says, computed by fastddp's kernels for the
// CPU.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include "cubin.h"

namespace fake_cuda {

// A launch: the arguments as kernels/pack_kernels.py lists them.
struct Launch {
  std::string kernel;  // fastddp_pack_fp32_to_bf16, fastddp_unpack_bf16_to_fp32, ...
  char* wire;
  const int64_t* table;
  const int64_t* chunks;
  double scale;
  unsigned programs;
  c10::DeviceIndex device;
};

bool has_twin(const Kernel& kernel);

// Null if the kernel's parameters are not those of a twin, or a scratch pointer is not null.
std::optional<Launch> read_launch(const Kernel& kernel, const std::vector<uint64_t>& values, unsigned programs,
                                  c10::DeviceIndex device);

// Which of the pointers of the launch leads to no memory of the device; empty if all do.
std::string problem_with_pointers(const Launch& launch);

// Decodes the tables and moves the elements, chunk by chunk in a shuffled order. Raises an "illegal memory access" where
// the tables point outside of the device's memory, or if there is a `problem` already.
void execute(const Launch& launch, const std::string& problem);

}  // namespace fake_cuda
