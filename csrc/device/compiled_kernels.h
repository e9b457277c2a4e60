// Triton kernels as binaries: loaded onto a device under their names, launched with their parameters.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "device/cuda_driver.h"

namespace fastddp {

// A kernel that kernels/ahead_of_time.py has compiled.
struct CompiledKernel {
  std::string name;
  std::string cubin;
  unsigned warps;
  unsigned shared_bytes;
  size_t parameters;  // its own, 8 bytes each
  size_t scratch_parameters;
  std::vector<int64_t> tile;  // the most that one program works on
};

// Note [A kernel proves itself before it is used]
// Nobody has run these binaries on every GPU, with every driver. So a kernel that is loaded for the first time in such a place is
// tried: it makes calls with made-up numbers that lead through all of its paths (fastddp/kernel_loading/kernel_cases.py), and torch's
// operators make the same calls on the same device. The results, and the memory around them, must be equal. Only then is the
// kernel proven, and used. A kernel is given up if it writes something else, does not load, or fails to launch at any time. From
// then on operators do its work in this process. Operators write what other ranks' kernels write, bit for bit; PowerSGD's sums
// agree to rounding. Operators also do the work of a kernel that could not be tried yet.
enum class Trust : uint8_t { untried, proven, given_up };

// For what kernels are launched: only proven ones in training; in a trial also those that nobody has tried.
enum class Purpose : uint8_t { training, trial };

// A kernel loaded onto one device. It stays loaded, at the same address, until the process ends.
struct LoadedKernel {
  c10::Device device;
  std::string name;
  LaunchableFunction function;
  size_t parameters;
  std::vector<int64_t> tile;
  std::string place;  // kind of device, driver and compiler, in words
};

// The device. Raises if it has no index.
c10::Device with_index(c10::Device device);

// Loads a kernel. One of the same name that is already known stays as it is. Raises where there is no CUDA driver. `place`:
// LoadedKernel's.
void load_kernel(c10::Device device, const CompiledKernel& kernel, std::string place, Trust trust);

// Null if no kernel of this name is loaded onto the device, or if it may not be launched for this purpose.
const LoadedKernel* find_kernel(c10::Device device, const std::string& name, Purpose purpose);

// Nothing if the kernel has neither been loaded nor given up.
std::optional<Trust> trust_in(c10::Device device, const std::string& name);

// The kernel has passed its trial. One that was given up stays so.
void note_proven(c10::Device device, const std::string& name);

// A kernel that is no longer used. `reason`: a sentence without a full stop.
struct GivenUp {
  c10::Device device;
  std::string name, place, reason;
};
// Returns the warning; empty if the kernel was given up before.
std::string note_given_up(const GivenUp& kernel);
std::vector<GivenUp> given_up();

// The driver has refused to launch one of these kernels: gives all of them up, with a warning.
void give_up(std::initializer_list<const LoadedKernel*> kernels, const LaunchError& error);

// The dtype as names of kernels have it: "fp32".
const char* triton_name(c10::ScalarType dtype);

constexpr size_t kMostScratch = 2;  // pointers that a launch passes for a kernel's scratch memory

}  // namespace fastddp
