// Where the memory of wires comes from.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fastddp {

// Note [Memory of wires]
// A process group may have memory that its network cards and switches know (NCCL's registered memory). A wire travels faster out
// of it. Whoever sends a wire says where its memory comes from; buckets know nothing of process groups.
//
// Each wire has its place there from the beginning (note [Slabs], transport/registered_memory.h), so ranks may make their wires
// in any order. Tensors that only one rank may need are ordinary memory: a wire in place of one that somebody kept, and what a
// rank sends in place of gradients when its window has failed. So are wires that are lent for a window.

// Makes a one-dimensional tensor, not initialised. Null: ordinary memory.
using WireMemory = std::function<at::Tensor(int64_t elements, const at::TensorOptions& options)>;

}  // namespace fastddp
