#include "device/compiled_kernels.h"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "errors/see.h"

namespace fastddp {
namespace {

constexpr unsigned kWarp = 32;

using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, std::string>;

std::mutex kernels_mutex;

std::map<Key, std::unique_ptr<LoadedKernel>>& loaded() {
  static auto& all = *new std::map<Key, std::unique_ptr<LoadedKernel>>();  // Note [Never destroyed]
  return all;
}

std::map<Key, GivenUp>& gone() {
  static auto& all = *new std::map<Key, GivenUp>();  // Note [Never destroyed]
  return all;
}

Key key(c10::Device device, const std::string& name) {
  TORCH_CHECK_VALUE(device.has_index(), "fastddp: device '", device, "' has no index; name one, as in '", device, ":0'");
  return {device.type(), device.index(), name};
}

}  // namespace

void load_kernel(c10::Device device, const CompiledKernel& kernel, std::string place, Trust trust) {
  const auto* driver = CudaDriver::of(device.type());
  TORCH_CHECK(driver != nullptr, "fastddp: no CUDA driver (libcuda.so.1) was found for ", device, see("FD040"));
  TORCH_CHECK_VALUE(kernel.scratch_parameters <= kMostScratch, "fastddp: kernel ", kernel.name, " takes ",
                    kernel.scratch_parameters, " scratch pointers; the launcher passes at most ", kMostScratch);
  auto* function =
      driver->load(device, kernel.cubin, kernel.name, kernel.shared_bytes, kernel.parameters + kernel.scratch_parameters);
  const LaunchableFunction launchable{function, kWarp * kernel.warps, kernel.shared_bytes};
  std::unique_ptr<LoadedKernel> made(
      new LoadedKernel{device, kernel.name, launchable, kernel.parameters, kernel.tile, std::move(place), trust});
  const std::lock_guard lock(kernels_mutex);
  loaded().try_emplace(key(device, kernel.name), std::move(made));
}

const LoadedKernel* find_kernel(c10::Device device, const std::string& name, Purpose purpose) {
  const std::lock_guard lock(kernels_mutex);
  const auto found = loaded().find(key(device, name));
  if (found == loaded().end()) return nullptr;
  const Trust trust = found->second->trust;
  const bool may = trust == Trust::proven || (trust == Trust::untried && purpose == Purpose::trial);
  return may ? found->second.get() : nullptr;
}

std::optional<Trust> trust_in(c10::Device device, const std::string& name) {
  const std::lock_guard lock(kernels_mutex);
  const auto where = key(device, name);
  if (gone().contains(where)) return Trust::given_up;
  const auto found = loaded().find(where);
  return found == loaded().end() ? std::nullopt : std::optional(found->second->trust.load());
}

void note_proven(c10::Device device, const std::string& name) {
  const std::lock_guard lock(kernels_mutex);
  const auto found = loaded().find(key(device, name));
  auto untried = Trust::untried;
  if (found != loaded().end()) found->second->trust.compare_exchange_strong(untried, Trust::proven);
}

std::string note_given_up(const GivenUp& kernel) {
  {
    const std::lock_guard lock(kernels_mutex);
    const auto where = key(kernel.device, kernel.name);
    if (const auto found = loaded().find(where); found != loaded().end()) found->second->trust = Trust::given_up;
    if (!gone().try_emplace(where, kernel).second) return "";
  }
  return c10::str("fastddp: the kernel ", kernel.name, " is not used any more on ", kernel.device, " (", kernel.place,
                  "): ", kernel.reason,
                  ". From here on torch's operators do its work: gradients are right, and a step takes longer. "
                  "`fastddp doctor` tries all kernels; please report what it prints.");
}

std::vector<GivenUp> given_up() {
  const std::lock_guard lock(kernels_mutex);
  std::vector<GivenUp> all;
  for (const auto& [where, kernel] : gone()) all.push_back(kernel);
  return all;
}

void give_up(std::initializer_list<const LoadedKernel*> kernels, const LaunchError& error) {
  for (const auto* kernel : kernels) {
    const auto warning = note_given_up({kernel->device, kernel->name, kernel->place, error.what_without_backtrace()});
    if (!warning.empty()) TORCH_WARN(warning);
  }
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
