// torch's operators on the simulated device: memory, views and copies here, everything else through the fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "copies.h"
#include "fallback.h"
#include "hooks.h"
#include "host_view.h"
#include "memory.h"

namespace fake_cuda {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() == size && !format.has_value()) return self;
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (format.has_value()) tensor->empty_tensor_restride(*format);
  const auto bytes = static_cast<size_t>(self.numel() + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  const at::Tensor nothing =
      at::detail::empty_generic({0}, device_allocator(), kKeys, self.scalar_type(), std::nullopt);
  return at::native::set_tensor_(self, nothing);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  copy(destination, self, non_blocking);
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  copy(destination, self, /*non_blocking=*/false);
  return destination;
}

at::Tensor& copy_to(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  copy(self, source, non_blocking);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const auto& queue = current_queue(self.device().index());
  Simulator::get().wait_for(Simulator::get().last(queue), "the value of a tensor");
  return host_view(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data(), queue_of(stream));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_", &set_to_nothing);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("copy_", &copy_to);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  // For these, torch has a form made of other operators, which would run instead and round differently from the CPU's.
  for (const auto* name :
       {"native_layer_norm", "native_group_norm", "convolution", "convolution_backward", "addr", "_stack"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace fake_cuda
