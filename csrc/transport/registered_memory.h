// Memory that is registered with a process group's network: note [Memory of wires], bucket/wire_memory.h.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <vector>

#include "bucket/wire_memory.h"

namespace fastddp {

// `allocate` returns `bytes` bytes on the device that the group's network knows, as one tensor; undefined: the group has no such
// memory. It may be a collective. `symmetric`: if one rank sends from such memory, all ranks have to, from the same place in it.
struct RegisteredMemory {
  using Allocate =
      std::function<at::Tensor(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t bytes, c10::Device device)>;
  Allocate allocate;
  bool symmetric = false;
};

// Note [Slabs]
// The wires of a plan that go over one group are parts of one piece of memory, the group's *slab*. One piece for each wire would
// cost much more, because a network may hand out hundreds of MiB at least. First, each wire's place is reserved, the same on all
// ranks. Then the slabs are allocated at a moment that all ranks share: in the forward that installs an exchange. A wire gets
// its place when it is first needed. Each place is given out once, since somebody may still hold the wire: a wire that replaces
// another one is ordinary memory. Wires are also ordinary memory if their exchange is installed while a graph is captured (which
// has its own pool), if their group has one rank, or if their group has no such memory.
class Slabs {
 public:
  explicit Slabs(const RegisteredMemory& memory) : memory_(memory) {}

  bool are_symmetric() const { return memory_.symmetric; }

  // Reserves a place in the group's slab; null: the wire gets ordinary memory.
  WireMemory reserve(c10d::ProcessGroup& group, c10::Device device, int64_t bytes);

  // Allocates the slabs. Called before the first use of a reserved place.
  void allocate();

  // The bytes that such a tensor takes in a place, aligned so that another one can follow.
  static int64_t bytes(int64_t elements, c10::ScalarType dtype);

 private:
  struct Slab;

  const std::shared_ptr<Slab>& of(c10d::ProcessGroup& group, c10::Device device);

  const RegisteredMemory& memory_;
  std::vector<std::shared_ptr<Slab>> slabs_;  // in the order of their first places
};

}  // namespace fastddp
