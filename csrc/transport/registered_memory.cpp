#include "transport/registered_memory.h"

#include <ATen/ops/empty.h>

#include "device/cuda_driver.h"
#include "transport/works.h"

namespace fastddp {
namespace {

c10::intrusive_ptr<c10d::Backend> backend_of(c10d::ProcessGroup& group, c10::Device device) {
  try {
    return group.getBackend(device.type());
  } catch (const std::exception&) {
    return nullptr;  // a group of Python's, say
  }
}

// Templates, so that they compile where a backend has no such functions.
template <typename Backend>
bool offers_memory(Backend& backend, c10::Device device) {
  if constexpr (requires { backend.supportsTensorAlloc(device.index()); }) {
    return backend.supportsTensorAlloc(device.index());
  }
  return false;
}

template <typename Backend>
at::Tensor allocate(Backend& backend, int64_t elements, const at::TensorOptions& options) {
  if constexpr (requires { backend.allocateTensor(elements, options); }) {
    try {
      return backend.allocateTensor(elements, options);
    } catch (const c10::DistBackendError&) {
      // Note [Groups that offer memory]: nothing has travelled yet.
    }
  }
  return at::empty({elements}, options);
}

}  // namespace

WireMemory registered_memory(c10d::ProcessGroup& group, c10::Device device) {
  if (device.is_cpu()) return nullptr;
  const auto backend = backend_of(group, device);
  if (!backend || !offers_memory(*backend, device)) return nullptr;
  return [backend](int64_t elements, const at::TensorOptions& options) {
    if (is_capturing(options.device())) return at::empty({elements}, options);
    const WithoutPythonObjects without;
    return allocate(*backend, elements, options);
  };
}

}  // namespace fastddp
