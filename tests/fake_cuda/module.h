// What Python can ask of the driver and of the process group.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

namespace fake_cuda {

// Kernels with this in their names, and no others, have this fault from now on: "bit" (one is flipped in the first byte of
// the output, of pack and block8's encode), "program" (one does not run), "launch" or "load" (is refused), or "none". Or a
// number: the driver answers the launch with this error. An error of what ran before stays until schedule(). "after sums": of
// measure, a byte after the table of sums is written.
void break_kernels(const std::string& part_of_name, const std::string& fault);

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
