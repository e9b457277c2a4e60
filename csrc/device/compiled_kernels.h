// Triton kernels as binaries: loaded onto a device under their names, launched with their parameters.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <filesystem>
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

// Note [A kernel proves itself where it first runs]
// Nobody has run these binaries on every GPU, with every driver. So the first call of a kernel is done twice, by the kernel and
// by torch's operators, and what both have written is compared on the device (proof.h). A kernel that writes something else, that
// does not load, or whose launch fails at any time, is given up: from then on operators do its work, in this process. What they
// write is what other ranks' kernels write, bit for bit; PowerSGD's sums agree to rounding.
enum class Trust : uint8_t { untried, proven, given_up };

// A kernel that has been loaded onto one device. It stays loaded, where it is, until the process ends.
struct LoadedKernel {
  c10::Device device;
  std::string name;
  LaunchableFunction function;
  size_t parameters;
  std::vector<int64_t> tile;
  std::string place;  // kind of device, driver and compiler, in words
  std::filesystem::path
      proof;  // a file that is there if the kernel has passed in such a place; empty: nothing is remembered
  mutable std::atomic<Trust> trust;
};

// Loads a kernel; one of its name that is known already stays as it is. Raises where there is no CUDA driver. `place`, `proof`: as
// LoadedKernel's.
void load_kernel(c10::Device device, const CompiledKernel& kernel, std::string place, std::filesystem::path proof);

// Null if no kernel of this name has been loaded onto the device, or if it has been given up.
const LoadedKernel* find_kernel(c10::Device device, const std::string& name);

// Whether load_kernel() or give_up() has been called for it.
bool is_known(c10::Device device, const std::string& name);

// Kernels that are used no more, with the reason, a sentence without a full stop.
struct GivenUp {
  c10::Device device;
  std::string name, place, reason;
};
// What to warn of; empty where the kernel has been given up before.
std::string note_given_up(const GivenUp& kernel);
std::vector<GivenUp> given_up();

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
