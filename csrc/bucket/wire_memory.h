// Where the memory of wires comes from.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastddp {

// Note [Memory of wires]
// Process groups may have memory of their own, which their network cards and switches know (NCCL's registered memory), and out of
// which a wire travels faster. Whoever sends a wire says where it comes from; buckets know nothing of process groups.
//
// Ranks take such memory in the same order and sizes, for a group may register it by a collective. So wires that come from a
// group are made all at once, in the order of the plan, by the first of them that is needed: make_wires(). Which one that is may
// differ between ranks. What only one rank may need is ordinary memory: a wire in place of one that somebody kept, and what a
// rank sends in place of gradients when its window has failed.

// One-dimensional, not initialised. Null: ordinary memory.
using WireMemory = std::function<at::Tensor(int64_t elements, const at::TensorOptions& options)>;

}  // namespace fastddp
