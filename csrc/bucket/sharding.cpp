#include "bucket/sharding.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace fastddp {
namespace {

using Runs = std::vector<Sharding::Run>;

Runs equal_runs(const Layout& layout, size_t ranks) {
  const auto each = layout.wire_length() / static_cast<int64_t>(ranks);
  Runs runs;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto begin = static_cast<int64_t>(rank) * each;
    runs.push_back({begin, begin + each});
  }
  return runs;
}

// Runs of whole members, in order. Each run ends where its length is nearest to an equal share of what is left, at a multiple of
// `unit`.
Runs cut_between_members(const Layout& layout, size_t ranks, int64_t unit) {
  Runs runs;
  size_t member = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto begin = member == 0 ? 0 : runs.back().end;
    const auto share = (layout.extent() - begin) / static_cast<int64_t>(ranks - rank);
    auto end = begin;
    for (; member < layout.size(); ++member) {
      const auto with_next = rounded_up(layout[member].offset + layout[member].length(), unit);
      const bool comes_nearer = with_next - begin - share <= share - (end - begin);
      if (rank + 1 < ranks && !comes_nearer) break;
      end = with_next;
    }
    runs.push_back({begin, end});
  }
  return runs;
}

// Deals the runs anew, the longest to the rank with the least load, and adds their lengths to `loads`.
void deal(Runs& runs, std::vector<int64_t>& loads) {
  auto longest_first = runs;
  std::ranges::stable_sort(longest_first, std::greater(), &Sharding::Run::length);
  std::vector<size_t> least_first(runs.size());
  std::iota(least_first.begin(), least_first.end(), 0);
  std::ranges::stable_sort(least_first, {}, [&](size_t rank) { return loads[rank]; });
  for (size_t i = 0; i < runs.size(); ++i) {
    runs[least_first[i]] = longest_first[i];
    loads[least_first[i]] += longest_first[i].length();
  }
}

// A tensor with the shape of a span's gradient. It has no memory, since nobody reads it.
at::Tensor like_part_of(const at::Tensor& parameter, int64_t begin, int64_t end) {
  if (begin == 0 && end == parameter.numel()) return parameter;
  auto like = at::empty({0}, parameter.detach().options());
  like.unsafeGetTensorImpl()->set_sizes_contiguous({end - begin});
  return like;
}

}  // namespace

Sharding::Sharding(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, Plan plan, size_t ranks,
                   size_t rank, bool whole, std::optional<Units> of_optimizer)
    : ranks_(ranks), rank_(rank), whole_(whole), units_(of_optimizer), plan_(std::move(plan)), spans_(plan_.size()) {
  TORCH_CHECK_VALUE(rank < ranks, "fastddp: there is no rank ", rank, " among the ", ranks, " that share a wire");
  std::vector<int64_t> loads(ranks);
  for (size_t index = 0; index < plan_.size(); ++index) {
    Layout layout(index, plan_.size(), plan_[index], parameters, names, {});
    if (units_) {
      layout.set_grid(grid());
    } else {
      layout.set_format(format_of(layout));
    }
    lengths_.push_back(layout.wire_length());
    places_.push_back(layout.offsets());
    runs_.push_back(whole ? cut_between_members(layout, ranks, grid().member) : equal_runs(layout, ranks));
    if (whole) deal(runs_.back(), loads);
    add_spans(layout);
  }
}

std::vector<at::Tensor> Sharding::cut(const at::Tensor& wire, size_t bucket) const {
  const auto scaled = [&](int64_t place) { return place * wire.numel() / length(bucket); };
  std::vector<at::Tensor> parts;
  for (const auto& run : runs(bucket)) {
    parts.push_back(wire.narrow(0, scaled(run.begin), scaled(run.end) - scaled(run.begin)));
  }
  return parts;
}

void Sharding::add_spans(const Layout& layout) {
  const auto& run = runs_[layout.index()][rank_];
  for (size_t member = 0; member < layout.size(); ++member) {
    const auto first = layout[member].offset;
    const auto begin = std::max(run.begin, first);
    const auto end = std::min(run.end, first + layout[member].length());
    if (begin < end) add(layout, member, begin - first, end - first);
  }
  if (spans_[layout.index()].empty()) add(layout, 0, 0, 0);
}

void Sharding::add(const Layout& layout, size_t member, int64_t begin, int64_t end) {
  const auto& parameter = layout[member].like;
  const auto numbers = parameter.is_complex() ? 2 : 1;
  auto& spans = spans_[layout.index()];
  const auto place = begin < end ? layout[member].offset + begin : runs_[layout.index()][rank_].begin;
  spans.push_back({spans.size(), layout.parameter(member), begin / numbers, end / numbers, place,
                   like_part_of(parameter, begin / numbers, end / numbers)});
}

}  // namespace fastddp
