// torch's operators on the simulated device: memory, views and copies here, everything else through the fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device.h"

namespace fake_cuda {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);  // fallback.cpp

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

at::Scalar local_scalar(const at::Tensor& self) {
  Simulator::get().wait_for(Simulator::get().last(current_queue(self.device().index())), "the value of a tensor");
  return host_view(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data(), queue_of(stream));
}

// --------------------------------------------------------------------------------------------------------------- copies

std::function<void()> copying(const at::Tensor& to, const at::Tensor& from) {
  return [to, from] { to.copy_(from); };
}

// Whether the bytes can go over as they lie; else torch makes a copy on the host first.
bool can_go_directly(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
         to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

// Pageable memory is read before the call returns, pinned memory when the copy runs.
void upload(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  constexpr auto what = "a blocking copy to the device";
  auto& simulator = Simulator::get();
  auto& queue = current_queue(destination.device().index());
  const bool pinned = is_pinned(source.const_data_ptr()) && can_go_directly(destination, source);
  TORCH_CHECK(queue.capture == nullptr || pinned,
              "cudaErrorStreamCaptureUnsupported: a copy from pageable memory during a capture");
  if (!non_blocking) simulator.check_wait(what);
  simulator.with_records([](Records& records) { ++records.uploads; });
  const auto from = pinned ? host_view(source) : source.detach().clone();
  const auto op = simulator.enqueue(queue, {"upload", copying(host_view(destination), from)});
  if (pinned) record_pinned_use(source.const_data_ptr(), op);
  if (!non_blocking) simulator.wait_for(op, what);
}

// What must not happen raises before anything is enqueued: a caller who got an exception may free the destination.
void download(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  constexpr auto what = "a copy to the host";
  auto& simulator = Simulator::get();
  const bool pinned = is_pinned(destination.const_data_ptr()), asynchronous = non_blocking && pinned;
  if (!asynchronous) simulator.check_wait(what);
  const auto op = simulator.enqueue(current_queue(source.device().index()),
                                    {"download", copying(host_view(destination), host_view(source))});
  if (pinned) record_pinned_use(destination.const_data_ptr(), op);
  if (!asynchronous) simulator.wait_for(op, what);
}

// Between devices, torch copies on the source's stream, and orders it with the destination's on both sides.
void copy_on_device(const at::Tensor& destination, const at::Tensor& source) {
  auto& simulator = Simulator::get();
  auto& to = current_queue(destination.device().index());
  auto& from = current_queue(source.device().index());
  Work work{"copy", copying(host_view(destination), host_view(source))};
  if (&to != &from) work.after.push_back(simulator.last(to));
  const auto op = simulator.enqueue(from, std::move(work));
  if (&to != &from) simulator.enqueue(to, {.name = "wait", .after = {op}});
}

at::Tensor& copy_to(at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  if (destination.numel() == 0 || destination.is_same(source)) return destination;
  const auto expanded = source.expand_as(destination);
  if (!on_device(source)) {
    upload(destination, expanded, non_blocking);
  } else if (!on_device(destination)) {
    download(destination, expanded, non_blocking);
  } else {
    copy_on_device(destination, expanded);
  }
  return destination;
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
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("copy_", &copy_to);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  // For these, torch has a form made of other operators, which would run instead and round differently from the CPU's.
  for (const auto* name : {"native_layer_norm", "native_group_norm", "convolution", "convolution_backward", "addr", "_stack"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace fake_cuda
