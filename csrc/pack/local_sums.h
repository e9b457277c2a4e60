// What this rank's gradients were before other ranks' were added to them, by member of a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "pack/measured.h"

namespace fastddp {

// Note [Local sums]
// Once gradients are averaged, a NaN is on all ranks. So what packs gradients, and reads each of them anyway, leaves what it
// has seen: the sum of squares and how many elements are not finite, of each member. On the CPU these are numbers. On other
// devices each program of a kernel leaves a row of its own, and the host adds up rows when somebody asks. The memory of rows is
// taken once, and the next window writes to it again: no step allocates anything, and a captured graph finds it where it was.
//
// Buckets on one device share it. So one reduction says whether anything in a window was not finite, however many buckets there
// are: a row that nothing has written in this window is not among those that are used.
class MeasuredRows {
 public:
  explicit MeasuredRows(c10::Device device) : device_(device) {}

  // There may be so many more in one window. Before any is taken.
  void make_room(int64_t rows) { room_ += rows; }
  // Begins a window.
  void reset() { used_ = 0; }

  // So many, for a kernel on the current stream; returns the number of the first one too.
  std::pair<at::Tensor, int64_t> take(int64_t count);
  // How many elements are not finite, on the device: undefined where no rows are used.
  at::Tensor not_finite() const;
  // All that are used. The host waits for the device.
  at::Tensor on_host() const;

 private:
  c10::Device device_;
  int64_t room_ = 0;
  int64_t used_ = 0;
  at::Tensor rows_;
};

class LocalSums {
 public:
  // `lengths`: the members' elements; complex numbers are pairs. `rows`: for all buckets on the device.
  LocalSums(std::vector<size_t> lengths, std::shared_ptr<MeasuredRows> rows);

  // Begins a window.
  void reset();

  // Of a kernel that runs on the host.
  void add(size_t member, const Measured& part) { on_host_[member] += part; }
  // Rows [sum of squares, count] for a kernel to write on the current stream: so many of each of these members, in this order.
  // Each member is measured once in a window.
  at::Tensor take_rows(const std::vector<std::pair<size_t, int64_t>>& of_members);

  const std::shared_ptr<MeasuredRows>& rows() const { return rows_; }
  // By member. `rows`: what rows()->on_host() has returned.
  std::vector<Measured> read(const at::Tensor& rows) const;
  // What the host knows without a wait.
  const std::vector<Measured>& on_host() const { return on_host_; }

 private:
  struct Taken {
    size_t member;
    int64_t first, count;  // rows
  };

  std::shared_ptr<MeasuredRows> rows_;
  std::vector<Measured> on_host_;
  std::vector<Taken> taken_;
};

}  // namespace fastddp
