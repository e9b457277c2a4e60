// Memory that a process group's network knows: note [Memory of wires], bucket/wire_memory.h.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bucket/wire_memory.h"

namespace fastddp {

// That of the group's backend for the device; null: it offers none.
//
// Note [Groups that offer memory]
// c10d's backends say whether they have an allocator (supportsTensorAlloc) and allocate by it (allocateTensor); NCCL's does so
// where GPUs are connected by a switch that multicasts. Groups that are no c10d backends have none, nor has a torch whose backends
// lack these functions. Ordinary memory is taken while a graph is captured, which has a pool of its own, and where NCCL has no
// communicator yet because nothing has travelled over it.
WireMemory registered_memory(c10d::ProcessGroup& group, c10::Device device);

}  // namespace fastddp
