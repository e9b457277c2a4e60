// What the current device and stream of a thread are.
#pragma once

#include <c10/core/Stream.h>

#include "simulator.h"

namespace fake_cuda {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device current_device();
Queue& current_queue(c10::DeviceIndex device);
Queue& queue_of(const c10::Stream& stream);

}  // namespace fake_cuda
