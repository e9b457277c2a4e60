// Memory that a process group's network knows: note [Memory of wires], bucket/wire_memory.h.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <vector>

#include "bucket/wire_memory.h"

namespace fastddp {

// So many bytes that the group's network knows, on the device, as one tensor; undefined: it has none. May be a collective.
// `symmetric`: where one rank sends out of such memory all have to, from the same place in it.
struct RegisteredMemory {
  using Allocate =
      std::function<at::Tensor(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t bytes, c10::Device device)>;
  Allocate allocate;
  bool symmetric = false;
};

// Note [Slabs]
// The wires of a plan that go over one group are parts of one piece of memory, the group's slab. A piece for each would cost much
// more, since a network may hand out hundreds of MiB at least. First all places are reserved, the same on all ranks. Then slabs are
// taken, at a moment that all ranks share: in the forward that installs an exchange. Each wire is made when it is needed.
// A place is given out once: what is to replace a wire, which somebody may still have, is ordinary memory. So are all wires of an
// exchange that is installed while a graph is captured, which has a pool of its own; those of a group of one rank; and those of
// a group that has no such memory.
class Slabs {
 public:
  explicit Slabs(const RegisteredMemory& memory) : memory_(memory) {}

  bool are_symmetric() const { return memory_.symmetric; }

  // Null, where there will be none.
  WireMemory reserve(c10d::ProcessGroup& group, c10::Device device, int64_t bytes);

  // Before the first use of what has been reserved.
  void take();

  // Of a place with room for such tensors one behind the other.
  static int64_t bytes(int64_t elements, c10::ScalarType dtype);

 private:
  struct Slab;

  const std::shared_ptr<Slab>& of(c10d::ProcessGroup& group, c10::Device device);

  const RegisteredMemory& memory_;
  std::vector<std::shared_ptr<Slab>> slabs_;  // in the order of their first places
};

}  // namespace fastddp
