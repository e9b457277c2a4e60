// What torch and the driver ask of a device: the current one, its streams and events, and its memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
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

// Memory of the device, and pinned memory of the host: both cached, both overwritten as soon as their next owner might.
// As torch's caching allocator for CUDA: a block belongs to the stream that was current when it was made. Once freed, it
// is given out again on that stream at once, or, if other streams were named as its users, when they have done what
// they had been given. At that moment its bytes become 0xFF, which is NaN in every floating point type. Fresh memory
// holds the same. No memory goes back to the system.
c10::Allocator* device_allocator();
void record_use(const void* address, Queue& queue);

// Freed pinned memory is overwritten and given out again when the copies between it and the device have run.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void record_pinned_use(const void* address, OpPtr copy);

// Whether [address, address + bytes) is within one segment, given out or not: what the device can touch without a fault. Memory
// that the host has freed may still be used by work that was enqueued before.
bool is_mapped(const void* address, size_t bytes, c10::DeviceIndex device);

// Of the device, in steps of 512 bytes: what tensors hold now, and the most that there was since the peak was reset.
inline std::atomic<size_t> allocated_bytes{0}, peak_bytes{0};

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
