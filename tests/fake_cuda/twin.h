// The kernels on host memory: what kernels/pack_kernels.py, low_rank_kernels.py, orthogonalise_kernels.py,
// block8_kernels.py and sum_shards_kernels.py say.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <bit>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cubin.h"
#include "memory.h"

namespace fake_cuda {

// What a kernel gets wrong, on purpose.
enum class Fault {
  none,
  bit,      // of the first byte of the memory that its twin names first, after it has run
  program,  // one of its programs does not run
  launch,   // is refused
  load,     // is refused
};

// A launch: the arguments as the kernel's module lists them, scratch pointers left out.
struct Launch {
  std::string kernel;
  std::vector<uint64_t> values;
  unsigned programs;
  c10::DeviceIndex device;
  Fault fault = Fault::none;

  template <typename T>
  T* pointer(size_t index) const {
    return reinterpret_cast<T*>(values.at(index));
  }
  double real(size_t index) const { return std::bit_cast<double>(values.at(index)); }
  int64_t integer(size_t index) const { return std::bit_cast<int64_t>(values.at(index)); }

  // The address, if `count` elements from there on are memory of the device.
  template <typename T>
  T* checked(T* address, int64_t count) const {
    const auto bytes = static_cast<size_t>(count) * sizeof(T);
    TORCH_CHECK(count == 0 || is_mapped(address, bytes, device), "illegal memory access: kernel ", kernel, " touches ",
                bytes, " bytes at ", static_cast<const void*>(address), ", which are not memory of device ",
                static_cast<int>(device));
    return address;
  }
};

// Memory that a launch has to name rightly.
struct Named {
  const char* name;
  const void* address;
  size_t bytes;
};

struct Twin {
  size_t parameters;  // all of 8 bytes
  std::function<std::vector<Named>(const Launch&)> memory;
  // One program of the launch; programs run in a shuffled order.
  std::function<void(const Launch&, int64_t program)> run;
};

// Null if there is none of this name.
std::optional<Twin> pack_twin(const std::string& kernel);
std::optional<Twin> low_rank_twin(const std::string& kernel);
std::optional<Twin> basis_twin(const std::string& kernel);
std::optional<Twin> block8_twin(const std::string& kernel);
std::optional<Twin> sums_twin(const std::string& kernel);

bool has_twin(const Kernel& kernel);

// Null if the kernel's parameters are not those of its twin, or a scratch pointer is not null.
std::optional<Launch> read_launch(const Kernel& kernel, const std::vector<uint64_t>& values, unsigned programs,
                                  c10::DeviceIndex device);

// Which of the pointers of the launch leads to no memory of the device; empty if all do.
std::string problem_with_pointers(const Launch& launch);

// How many chunks pack and unpack have moved element by element, because one of their ends was not aligned.
size_t chunks_by_element();

// Raises an "illegal memory access" where the tables point outside of the device's memory, or if there is a `problem`
// already.
void execute(const Launch& launch, const std::string& problem);

}  // namespace fake_cuda
