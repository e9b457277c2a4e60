// What Python can ask of the driver and of the process group.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <map>

namespace fake_cuda {

// Kernels with this in their names, and no others, have this fault from now on: "bit" (one is flipped in the first byte of
// the output, of pack and block8's encode), "program" (one does not run), "launch" or "load" (is refused), or "none". Or a
// number: the driver answers the launch with this error. An error of what ran before stays until schedule().
//
// With `where`, which gets facts about a program by name (twin.h), faults are those of programs for which it is true. There "bit"
// is the lowest one of the last element that the program writes, "top" the highest; "one": 1 is added to its first element, an
// fp64; "skip": it does not run; "after", "before": it writes a byte after its last element, or in front of its first. `output`
// says of which output, by name.
using Facts = std::map<std::string, int64_t>;
void break_kernels(const std::string& part_of_name, const std::string& fault,
                   std::function<bool(const Facts&)> where = {}, const std::string& output = "result");
// How many programs had a fault since then.
size_t broken_programs();

// Compute capability of all devices, without the dot. Modules for another one do not load.
void set_capability(int capability);

// A c10d backend that treats streams as NCCL's does. `inner`: the backend that moves the data between ranks, on CPU
// tensors; null: all `size` ranks are taken to hold what this one holds. `name`: of the backend that it stands in for.
// `host_waits`: Work::wait keeps the thread that calls it, as NCCL's does with TORCH_NCCL_BLOCKING_WAIT.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& inner,
                                               const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               const std::string& name, bool host_waits);

// Whether groups offer memory of their own (Backend::supportsTensorAlloc), and what they were asked for since then.
void offer_memory(bool offered);
std::vector<std::pair<uintptr_t, size_t>> memory_asked_for();

}  // namespace fake_cuda
