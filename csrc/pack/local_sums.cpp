#include "pack/local_sums.h"

#include <ATen/ops/empty.h>

#include "device/streams.h"

namespace fastddp {

std::pair<at::Tensor, int64_t> MeasuredRows::next(int64_t count) {
  if (!rows_.defined()) rows_ = at::empty({room_, 2}, at::TensorOptions().dtype(at::kDouble).device(device_));
  TORCH_INTERNAL_ASSERT(used_ + count <= rows_.size(0), "fastddp: a gradient was measured twice in one window");
  // Orders no gradients.
  keep_for_current_stream(rows_);
  const auto first = used_;
  used_ += count;
  return {rows_.narrow(0, first, count), first};
}

at::Tensor MeasuredRows::not_finite() const {
  if (used_ == 0) return {};
  // Orders no gradients.
  keep_for_current_stream(rows_);
  return rows_.narrow(0, 0, used_).select(1, 1).sum();
}

at::Tensor MeasuredRows::on_host() const {
  return used_ == 0 ? at::Tensor() : rows_.narrow(0, 0, used_).cpu();
}

LocalSums::LocalSums(std::vector<size_t> lengths, std::shared_ptr<MeasuredRows> rows)
    : rows_(std::move(rows)), on_host_(lengths.size()) {
  constexpr size_t row_elements = 4096;  // a program works on at least so many, except for the last one of a gradient
  int64_t all = 0;
  for (const auto length : lengths) all += static_cast<int64_t>((length + row_elements - 1) / row_elements);
  rows_->make_room(all);
}

at::Tensor LocalSums::take_rows(const std::vector<std::pair<size_t, int64_t>>& of_members) {
  int64_t count = 0;
  for (const auto& [member, rows] : of_members) count += rows;
  const auto [taken, first] = rows_->next(count);
  auto next = first;
  for (const auto& [member, rows] : of_members) {
    taken_.push_back({member, next, rows});
    next += rows;
  }
  return taken;
}

void LocalSums::give_back(const at::Tensor& rows) {
  rows_->give_back(rows.size(0));
  for (auto left = rows.size(0); left > 0; taken_.pop_back()) left -= taken_.back().count;
}

std::vector<Measured> LocalSums::read(const at::Tensor& rows) const {
  auto all = on_host_;
  for (const auto& [member, first, count] : taken_) {
    const auto* next = rows.const_data_ptr<double>() + 2 * first;
    for (int64_t row = 0; row < count; ++row, next += 2) all[member] += {next[0], static_cast<int64_t>(next[1])};
  }
  return all;
}

}  // namespace fastddp
