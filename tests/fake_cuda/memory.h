// Memory of the simulated device, and pinned memory of the host: both cached, both overwritten as soon as their next
// owner might.
#pragma once

#include <c10/core/Allocator.h>

#include "simulator.h"

namespace fake_cuda {

// As torch's caching allocator for CUDA: a block belongs to the stream that was current when it was made. Once freed, it
// is given out again on that stream at once, or, if other streams were named as its users, when they have done what
// they had been given. At that moment its bytes become 0xFF, which is NaN in every floating point type.
c10::Allocator* device_allocator();
void record_use(void* address, Queue& queue);

// Freed pinned memory is given out again when the copies that read it have run.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void record_pinned_use(const void* address, OpPtr reader);

// Whether [address, address + bytes) is inside one block of the device; `live`: one that is not free right now. What the
// device does is ordered by streams: memory that the host has freed since may still be read by earlier work.
bool is_memory(const void* address, size_t bytes, c10::DeviceIndex device, bool live);

size_t allocated_bytes();
size_t peak_bytes();
void reset_peak();

}  // namespace fake_cuda
