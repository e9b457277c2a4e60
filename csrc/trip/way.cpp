#include "trip/way.h"

#include <algorithm>
#include <iterator>

namespace fastddp {

std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> Way::groups() const {
  auto groups = hook_groups;
  if (all != nullptr) groups.push_back(all);
  for (const auto* some : {&lanes, &node}) {
    if (*some) std::ranges::copy((*some)->all(), std::back_inserter(groups));
  }
  return groups;
}

c10d::ProcessGroup* Way::lane(size_t number, c10::Device device) const {
  if (hook != nullptr) return number == 0 ? all.get() : nullptr;
  const bool sends_messages = lanes && !nodes.empty() && goes_in_pairs(*lanes->first(), device);
  return lanes && !node && !keeps_runs() && !sends_messages ? lanes->at(number) : nullptr;
}

void Way::meet(c10::Device device) {
  const bool has_levels = lanes && !nodes.empty() && (node || !keeps_runs());
  if (sharding != nullptr && run_owners == nullptr) {
    run_owners = make_owners(node ? *node : *lanes, device, /*own_sums=*/!node && !nodes.empty());
  }
  if (!has_levels || !levels.empty()) return;
  TORCH_CHECK_VALUE(static_cast<int64_t>(nodes.size()) == lanes->ranks(), "fastddp: the nodes of ", nodes.size(),
                    " ranks do not fit a process group of ", lanes->ranks());
  const auto rank = lanes->first()->getRank();
  const bool in_pairs = goes_in_pairs(*lanes->first(), device);
  levels = in_pairs ? make_levels(nodes, rank) : std::vector{all_ranks(nodes.size(), rank)};
  for (const auto& level : levels) level_owners.push_back(in_pairs ? make_pairs(level, *lanes) : make_all_to_all(level));
}

}  // namespace fastddp
