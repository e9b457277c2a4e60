// Sums over this rank's gradients before other ranks' are added to them, by member of a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "pack/measured.h"

namespace fastddp {

// Note [Local sums]
// Once gradients are averaged, a NaN is on all ranks. So pack, which reads each gradient anyway, also writes for each member the
// sum of squares and how many elements are not finite. On the CPU these are numbers. On other devices each program of a kernel
// writes a row of its own, and the host adds up the rows when somebody asks. The rows' memory is taken once, and each window
// writes it again: no step allocates anything, and a captured graph finds it where it was.
//
// Buckets on one device share the rows. So one reduction says whether anything in a window was not finite, however many buckets
// there are. A row that nothing has written in this window is not among those that are used.
class MeasuredRows {
 public:
  explicit MeasuredRows(c10::Device device) : device_(device) {}

  // A window may use so many more rows. Call before any is taken.
  void make_room(int64_t rows) { room_ += rows; }
  // Begins a window.
  void reset() { used_ = 0; }

  // Takes so many rows, for a kernel on the current stream. Also returns the number of the first one.
  std::pair<at::Tensor, int64_t> next(int64_t count);
  // So many of the last rows were not written after all.
  void give_back(int64_t count) { used_ -= count; }
  // How many elements are not finite, on the device; undefined if no rows are used.
  at::Tensor not_finite() const;
  // All used rows. The host waits for the device.
  at::Tensor on_host() const;

 private:
  c10::Device device_;
  int64_t room_ = 0;
  int64_t used_ = 0;
  at::Tensor rows_;
};

class LocalSums {
 public:
  // `lengths`: the members' elements; complex numbers are pairs. `rows`: shared by all buckets on the device.
  LocalSums(std::vector<size_t> lengths, std::shared_ptr<MeasuredRows> rows);

  // Begins a window.
  void reset() {
    std::ranges::fill(on_host_, Measured{});
    taken_.clear();
  }

  // Adds what a kernel on the host has measured.
  void add(size_t member, const Measured& part) { on_host_[member] += part; }
  void add(const SumInOrder& measured) {
    for (const auto& [place, part] : measured.parts()) add(place.second, part);
  }
  // Takes rows [sum of squares, count] for a kernel to write on the current stream: so many for each of these members, in this
  // order. Each member is measured once in a window.
  at::Tensor take_rows(const std::vector<std::pair<size_t, int64_t>>& of_members);

  // The kernel has not been launched. `rows`: those that were taken last.
  void give_back(const at::Tensor& rows);

  const std::shared_ptr<MeasuredRows>& rows() const { return rows_; }
  // The sums by member. `rows`: what rows()->on_host() has returned.
  std::vector<Measured> read(const at::Tensor& rows) const;
  // The sums that the host knows without a wait.
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
