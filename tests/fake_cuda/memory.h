// Memory of the simulated device, and pinned memory of the host: both cached, both overwritten as soon as their next
// owner might.
#pragma once

#include <c10/core/Allocator.h>

#include "simulator.h"

namespace fake_cuda {

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

// Whether [address, address + bytes) is within one allocation that is not freed.
bool is_allocated(const void* address, size_t bytes, c10::DeviceIndex device);
// Whether it is within one block, freed or not: what the device can touch without a fault. Memory that the host has freed
// may still be used by work that was enqueued before.
bool is_mapped(const void* address, size_t bytes, c10::DeviceIndex device);

// Of the device, in steps of 512 bytes: what tensors hold now, and the most that there was since the peak was reset.
inline std::atomic<size_t> allocated_bytes{0}, peak_bytes{0};

}  // namespace fake_cuda
