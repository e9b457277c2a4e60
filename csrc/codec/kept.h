// Restores what a codec remembered: note [What is remembered for good], codec.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>

#include "device/streams.h"

namespace fastddp {

// memory = kept; `only_if` as in Codec::undo().
inline void bring_back(const at::Tensor& memory, const at::Tensor& kept, const at::Tensor& only_if) {
  for (const auto& tensor : {memory, kept}) {
    // Orders no gradients.
    keep_for_current_stream(tensor);
  }
  memory.copy_(only_if.defined() ? at::where(only_if.to(memory.device()).ne(0), kept, memory) : kept);
}

}  // namespace fastddp
