// Triton kernels as binaries: loaded onto a device under their names, launched with their parameters.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "device/cuda_driver.h"

namespace fastddp {

// What kernels/ahead_of_time.py says of a kernel that it compiled.
struct CompiledKernel {
  std::string name;
  std::string cubin;
  unsigned warps;
  unsigned shared_bytes;
  size_t parameters;  // of its own, 8 bytes each
  size_t scratch_parameters;
  std::vector<int64_t> tile;  // what one program works on at most
};

// A kernel that has been loaded onto one device. It stays loaded, where it is, until the process ends.
struct LoadedKernel {
  LaunchableFunction function;
  size_t parameters;
  std::vector<int64_t> tile;
};

// Loads a kernel; one of its name that is there already stays. Raises where there is no CUDA driver.
void load_kernel(c10::Device device, const CompiledKernel& kernel);

// Null if no kernel of this name has been loaded onto the device.
const LoadedKernel* find_kernel(c10::Device device, const std::string& name);

// As kernels are called after it: "fp32".
const char* triton_name(c10::ScalarType dtype);

constexpr size_t kMostScratch = 2;

// Launches kernels on one device, and counts the launches.
class Launcher {
 public:
  Launcher(c10::Device device, const CudaDriver& driver) : device_(device), driver_(driver) {}

  // On the device's current stream. Arguments are pointers, double and int64_t, as the kernel's module lists them. What has no
  // elements needs no program, and is no launch.
  template <typename... Arguments>
  void run(const LoadedKernel& kernel, unsigned programs, Arguments... arguments) {
    static_assert(((sizeof(Arguments) == 8) && ...));
    TORCH_INTERNAL_ASSERT(sizeof...(Arguments) == kernel.parameters);
    if (programs == 0) return;
    const void* scratch = nullptr;
    void* parameters[sizeof...(Arguments) + kMostScratch] = {&arguments..., &scratch, &scratch};
    driver_.launch(kernel.function, programs, device_, parameters);
    ++launches_;
  }

  size_t launches() const { return launches_; }

 private:
  const c10::Device device_;
  const CudaDriver& driver_;
  size_t launches_ = 0;
};

}  // namespace fastddp
