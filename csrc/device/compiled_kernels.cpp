#include "device/compiled_kernels.h"

#include <map>
#include <mutex>
#include <tuple>

#include "errors/see.h"

namespace fastddp {
namespace {

constexpr unsigned kWarp = 32;

using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, std::string>;

std::mutex kernels_mutex;

// What is known of a kernel: it is loaded, or given up, or first the one and then the other.
struct Known {
  std::optional<LoadedKernel> loaded;
  Trust trust = Trust::untried;
  std::optional<GivenUp> given_up;
};

std::map<Key, Known>& kernels() {
  static auto& all = *new std::map<Key, Known>();  // Note [Never destroyed]
  return all;
}

Key key(c10::Device device, const std::string& name) {
  return {device.type(), with_index(device).index(), name};
}

}  // namespace

c10::Device with_index(c10::Device device) {
  TORCH_CHECK_VALUE(device.has_index(), "fastddp: device '", device, "' has no index; name one, as in '", device, ":0'");
  return device;
}

void load_kernel(c10::Device device, const CompiledKernel& kernel, std::string place, Trust trust) {
  const auto* driver = CudaDriver::of(device.type());
  TORCH_CHECK(driver != nullptr, "fastddp: no CUDA driver (libcuda.so.1) was found for ", device, see("FD040"));
  TORCH_CHECK_VALUE(kernel.scratch_parameters <= kMostScratch, "fastddp: kernel ", kernel.name, " takes ",
                    kernel.scratch_parameters, " scratch pointers; the launcher passes at most ", kMostScratch);
  auto* function =
      driver->load(device, kernel.cubin, kernel.name, kernel.shared_bytes, kernel.parameters + kernel.scratch_parameters);
  const LaunchableFunction launchable{function, kWarp * kernel.warps, kernel.shared_bytes};
  LoadedKernel made{device, kernel.name, launchable, kernel.parameters, kernel.tile, std::move(place)};
  const std::lock_guard lock(kernels_mutex);
  kernels().try_emplace(key(device, kernel.name), Known{std::move(made), trust, {}});
}

const LoadedKernel* find_kernel(c10::Device device, const std::string& name, Purpose purpose) {
  const std::lock_guard lock(kernels_mutex);
  const auto found = kernels().find(key(device, name));
  if (found == kernels().end()) return nullptr;
  const auto& [loaded, trust, given_up] = found->second;
  return trust == Trust::proven || (trust == Trust::untried && purpose == Purpose::trial) ? &*loaded : nullptr;
}

std::optional<Trust> trust_in(c10::Device device, const std::string& name) {
  const std::lock_guard lock(kernels_mutex);
  const auto found = kernels().find(key(device, name));
  return found == kernels().end() ? std::nullopt : std::optional(found->second.trust);
}

void note_proven(c10::Device device, const std::string& name) {
  const std::lock_guard lock(kernels_mutex);
  const auto found = kernels().find(key(device, name));
  if (found != kernels().end() && found->second.trust == Trust::untried) found->second.trust = Trust::proven;
}

std::string note_given_up(const GivenUp& kernel) {
  {
    const std::lock_guard lock(kernels_mutex);
    auto& known = kernels()[key(kernel.device, kernel.name)];
    if (known.trust == Trust::given_up) return "";
    known.trust = Trust::given_up;
    known.given_up = kernel;
  }
  return c10::str("fastddp: the kernel ", kernel.name, " is not used any more on ", kernel.device, " (", kernel.place,
                  "): ", kernel.reason,
                  ". From here on torch's operators do its work: gradients are right, and a step takes longer. "
                  "`fastddp doctor` tries all kernels; please report what it prints.");
}

std::vector<GivenUp> given_up() {
  const std::lock_guard lock(kernels_mutex);
  std::vector<GivenUp> all;
  for (const auto& [where, kernel] : kernels()) {
    if (kernel.given_up) all.push_back(*kernel.given_up);
  }
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
