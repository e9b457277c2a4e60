// What torch asks an accelerator.
#pragma once

#include <ATen/core/Generator.h>

namespace fake_cuda {

void install_hooks();

// A seed for one random operation, drawn from the device's generator when the operation is enqueued: what it yields does
// not depend on when it runs.
uint64_t next_seed();
void manual_seed(uint64_t seed);

// Gives the storage `bytes` bytes; what it held is copied in the order of the current stream.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace fake_cuda
