#include "bucket/node_shards.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace fastddp {
namespace {

constexpr size_t kRunBytes = 64;  // a cache line of the CPU

using Runs = std::vector<NodeShards::Run>;

Runs equal_runs(const Layout& layout, size_t ranks) {
  const auto each = layout.wire_length() / static_cast<int64_t>(ranks);
  Runs runs;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto begin = static_cast<int64_t>(rank) * each;
    runs.push_back({begin, begin + each});
  }
  return runs;
}

// Runs of whole members, in order. Each run ends where its length is nearest to an equal share of what is left.
Runs cut_between_members(const Layout& layout, size_t ranks) {
  Runs runs;
  size_t member = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto begin = member == 0 ? 0 : runs.back().end;
    const auto share = (layout.extent() - begin) / static_cast<int64_t>(ranks - rank);
    auto end = begin;
    for (; member < layout.size(); ++member) {
      const auto with_next = layout.offset(member) + layout.length(member);
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
  std::ranges::stable_sort(longest_first, std::greater(), &NodeShards::Run::length);
  std::vector<size_t> least_first(runs.size());
  std::iota(least_first.begin(), least_first.end(), 0);
  std::ranges::stable_sort(least_first, {}, [&](size_t rank) { return loads[rank]; });
  for (size_t i = 0; i < runs.size(); ++i) {
    runs[least_first[i]] = longest_first[i];
    loads[least_first[i]] += longest_first[i].length();
  }
}

int64_t numbers_in_an_element(const at::Tensor& parameter) {
  return parameter.is_complex() ? 2 : 1;
}

// A tensor with the shape of a span's gradient. It has no memory, since nobody reads it.
at::Tensor like_part_of(const at::Tensor& parameter, const Span& span) {
  if (span.begin == 0 && span.end == parameter.numel()) return parameter;
  auto like = at::empty({0}, parameter.detach().options());
  like.unsafeGetTensorImpl()->set_sizes_contiguous({span.end - span.begin});
  return like;
}

}  // namespace

NodeShards::NodeShards(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, Plan plan,
                       size_t ranks, size_t rank, bool whole)
    : ranks_(ranks),
      rank_(rank),
      whole_(whole),
      plan_(std::move(plan)),
      members_(plan_.size()),
      offsets_(plan_.size()) {
  TORCH_CHECK_VALUE(rank < ranks, "fastddp: there is no rank ", rank, " among the ", ranks, " of a node");
  std::vector<int64_t> loads(ranks);
  for (size_t index = 0; index < plan_.size(); ++index) {
    Layout layout(index, plan_.size(), whole_members(plan_[index], parameters, names), {});
    layout.set_format(format_of(layout));
    runs_.push_back(whole ? cut_between_members(layout, ranks) : equal_runs(layout, ranks));
    if (whole) deal(runs_.back(), loads);
    add_spans(layout);
  }
}

WireFormat NodeShards::format_of(const Layout& layout) const {
  const auto dtype = layout.gradient_dtype();
  const auto unit = whole_ ? 1 : ranks_ * kRunBytes / c10::elementSize(dtype);
  return {dtype, Placing::aligned, static_cast<int64_t>(unit)};
}

bool NodeShards::fit(const std::vector<Bucket>& buckets) const {
  return std::ranges::equal(buckets, plan_, {}, [](const auto& bucket) { return bucket.layout.parameters(); });
}

std::vector<Span> NodeShards::spans() const {
  std::vector<Span> spans;
  for (const auto& members : members_) {
    for (const auto& member : members) spans.push_back(member.span);
  }
  return spans;
}

Bucket NodeShards::make_bucket(size_t index) const {
  std::vector<at::Tensor> boxes;
  for (size_t i = 0; i < members_[index].size(); ++i) boxes.push_back(at::empty({0}));
  return {Layout(index, plan_.size(), members_[index], {}), std::move(boxes)};
}

void NodeShards::add_spans(const Layout& layout) {
  const auto& run = runs_[layout.index()][rank_];
  for (size_t member = 0; member < layout.size(); ++member) {
    const auto first = layout.offset(member);
    const auto begin = std::max(run.begin, first);
    const auto end = std::min(run.end, first + layout.length(member));
    if (begin < end) add(layout, member, begin - first, end - first, begin - run.begin);
  }
  if (members_[layout.index()].empty()) add(layout, 0, 0, 0, 0);
}

void NodeShards::add(const Layout& layout, size_t member, int64_t begin, int64_t end, int64_t offset) {
  const auto& [whole, parameter, name] = layout[member];
  const auto numbers = numbers_in_an_element(parameter);
  const Span span{whole.parameter, begin / numbers, end / numbers};
  members_[layout.index()].push_back({span, like_part_of(parameter, span), name});
  offsets_[layout.index()].push_back(offset);
}

}  // namespace fastddp
