// Where the memory of wires comes from.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastddp {

// Note [Memory of wires]
// Process groups may have memory of their own, which their network cards and switches know (NCCL's registered memory), and out of
// which a wire travels faster. Whoever sends a wire says where it comes from; buckets know nothing of process groups.
//
// Each wire has its place there from the beginning (note [Slabs], transport/registered_memory.h), so ranks may make their wires
// in any order. What only one rank may need is ordinary memory: a wire in place of one that somebody kept, and what a rank sends
// in place of gradients when its window has failed. So are wires that are lent for a window.

// One-dimensional, not initialised. Null: ordinary memory.
using WireMemory = std::function<at::Tensor(int64_t elements, const at::TensorOptions& options)>;

}  // namespace fastddp
