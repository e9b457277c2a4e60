// What the current device and stream of a thread are.
#pragma once

#include <c10/core/Stream.h>

#include "simulator.h"

namespace fake_cuda {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device current_device();
Queue& current_queue(c10::DeviceIndex device);
Queue& queue_of(const c10::Stream& stream);

// A stream as the driver knows it. The default stream is null there, and means that of the thread's current device.
void* native_handle(const c10::Stream& stream);
Queue& queue_of_handle(void* handle);

// How many were made, and how often one was recorded that knows its time.
std::pair<size_t, size_t> events();

// A thread that has made no call of the runtime yet has no context of the driver; the first call gives it that of its
// current device.
bool has_context();
void need_context();
void set_context(c10::DeviceIndex device);  // -1: none

}  // namespace fake_cuda
