// How operators without a kernel of their own run on the simulated device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace fake_cuda {

// Asks the operator on the meta device what it returns, makes such tensors, and enqueues the CPU's kernel over the same
// memory on the current stream. An operator whose result the host needs to go on (a number, a shape that depends on
// values) makes it wait, as on a GPU.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fake_cuda
