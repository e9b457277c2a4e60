#include "pack/local_sums.h"

#include <ATen/ops/empty.h>

#include "device/streams.h"

namespace fastddp {

LocalSums::LocalSums(c10::Device device, std::vector<size_t> lengths)
    : device_(device), lengths_(std::move(lengths)), on_host_(lengths_.size()) {}

void LocalSums::reset() {
  on_host_.assign(lengths_.size(), {});
  used_ = 0;
  members_.clear();
}

at::Tensor LocalSums::take_rows(const std::vector<std::pair<size_t, int64_t>>& of_members) {
  constexpr size_t row_elements = 4096;  // no program works on fewer, but for the last of a gradient
  if (!rows_.defined()) {
    int64_t all = 0;
    for (const auto length : lengths_) all += static_cast<int64_t>((length + row_elements - 1) / row_elements);
    rows_ = at::empty({all, 2}, at::TensorOptions().dtype(at::kDouble).device(device_));
  }
  int64_t count = 0;
  for (const auto& [member, rows] : of_members) count += rows;
  TORCH_INTERNAL_ASSERT(used_ + count <= rows_.size(0), "fastddp: a gradient was measured twice in one window");
  members_.insert(members_.end(), of_members.begin(), of_members.end());
  // Orders no gradients.
  keep_for_current_stream(rows_);
  const auto taken = rows_.narrow(0, used_, count);
  used_ += count;
  return taken;
}

std::vector<Measured> LocalSums::read() const {
  auto all = on_host_;
  if (used_ == 0) return all;
  const auto rows = used_rows().cpu();
  const auto* next = rows.const_data_ptr<double>();
  for (const auto& [member, count] : members_) {
    for (int64_t row = 0; row < count; ++row, next += 2) all[member] += {next[0], static_cast<int64_t>(next[1])};
  }
  return all;
}

at::Tensor LocalSums::not_finite() const {
  if (used_ == 0) return {};
  // Orders no gradients.
  keep_for_current_stream(rows_);
  return used_rows().select(1, 1).sum();
}

}  // namespace fastddp
