// What this rank's gradients were before other ranks' were added to them, by member of a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "pack/measured.h"

namespace fastddp {

// Note [Local sums]
// Once gradients are averaged, a NaN is on all ranks. So what packs gradients, and reads each of them anyway, leaves what it
// has seen: the sum of squares and how many elements are not finite, of each member. On the CPU these are numbers. On other
// devices each program of a kernel leaves a row of its own, and the host adds up rows when somebody asks. The memory of rows is
// taken once, and the next window writes to it again: no step allocates anything, and a captured graph finds it where it was.
class LocalSums {
 public:
  // `lengths`: the members' elements; complex numbers are pairs.
  LocalSums(c10::Device device, std::vector<size_t> lengths);

  // Begins a window.
  void reset();

  // Of a kernel that runs on the host.
  void add(size_t member, const Measured& part) { on_host_[member] += part; }
  // Rows [sum of squares, count] for a kernel to write on the current stream: so many of each of these members, in this order.
  // Each member is measured once in a window.
  at::Tensor take_rows(const std::vector<std::pair<size_t, int64_t>>& of_members);

  // By member. The host waits for the device.
  std::vector<Measured> read() const;
  // How many elements of all members are not finite, on the device: undefined where no kernel has left rows.
  at::Tensor not_finite() const;
  // What the host knows without a wait.
  const std::vector<Measured>& on_host() const { return on_host_; }

 private:
  at::Tensor used_rows() const { return rows_.narrow(0, 0, used_); }

  c10::Device device_;
  std::vector<size_t> lengths_;
  std::vector<Measured> on_host_;
  at::Tensor rows_;
  int64_t used_ = 0;
  std::vector<std::pair<size_t, int64_t>> members_;  // of the rows that are used
};

}  // namespace fastddp
