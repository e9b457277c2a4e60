#include "device/compiled_kernels.h"

#include <map>
#include <mutex>
#include <tuple>

namespace fastddp {
namespace {

constexpr unsigned kWarp = 32;

using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, std::string>;

std::mutex loaded_mutex;

std::map<Key, LoadedKernel>& loaded() {
  static auto& all = *new std::map<Key, LoadedKernel>();  // Note [Never destroyed]
  return all;
}

Key key(c10::Device device, const std::string& name) {
  TORCH_CHECK_VALUE(device.has_index(), "fastddp: device '", device, "' has no index; name one, as in '", device,
                    ":0'");
  return {device.type(), device.index(), name};
}

}  // namespace

void load_kernel(c10::Device device, const CompiledKernel& kernel) {
  const auto* driver = CudaDriver::of(device.type());
  TORCH_CHECK(driver != nullptr, "fastddp: no CUDA driver (libcuda.so.1) was found for ", device);
  TORCH_CHECK_VALUE(kernel.scratch_parameters <= kMostScratch, "fastddp: kernel ", kernel.name, " takes ",
                    kernel.scratch_parameters, " scratch pointers; the launcher passes at most ", kMostScratch);
  auto* function = driver->load(device, kernel.cubin, kernel.name, kernel.shared_bytes,
                                kernel.parameters + kernel.scratch_parameters);
  const LaunchableFunction launchable{function, kWarp * kernel.warps, kernel.shared_bytes};
  const std::lock_guard lock(loaded_mutex);
  loaded().try_emplace(key(device, kernel.name), LoadedKernel{launchable, kernel.parameters, kernel.tile});
}

const LoadedKernel* find_kernel(c10::Device device, const std::string& name) {
  const std::lock_guard lock(loaded_mutex);
  const auto found = loaded().find(key(device, name));
  return found == loaded().end() ? nullptr : &found->second;
}

const char* triton_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "fp32";
    case c10::ScalarType::Half:
      return "fp16";
    case c10::ScalarType::BFloat16:
      return "bf16";
    case c10::ScalarType::Double:
      return "fp64";
    default:
      return c10::toString(dtype);  // no kernel has such a name
  }
}

}  // namespace fastddp
