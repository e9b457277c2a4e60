// What torch and the driver ask of a device: the current one, and its streams and events.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Stream.h>

#include "simulator.h"

namespace fake_cuda {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device current_device();
Queue& current_queue(c10::DeviceIndex device);
Queue& queue_of(const c10::Stream& stream);
// A stream as the driver knows it: the default stream is null there, and means that of the thread's current device.
Queue& queue_of_handle(void* handle);

// How many were made, and how often one was recorded that knows its time.
std::pair<size_t, size_t> events();

// Whether this thread has a context of the driver. The first call of the runtime gives it that of its current device.
inline thread_local bool has_context = false;
void set_context(c10::DeviceIndex device);

void install_hooks();

// Gives the storage `bytes` bytes; what it held is copied in the order of the current stream.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A CPU tensor with the elements of `tensor`. It does not keep the memory: what is enqueued may capture it and holds
// nothing, as a kernel holds nothing.
inline at::Tensor host_view(const at::Tensor& tensor) {
  auto* address = tensor.numel() == 0 ? nullptr : const_cast<void*>(tensor.const_data_ptr());
  auto view = at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

}  // namespace fake_cuda
