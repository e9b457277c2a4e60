#include "transport/levels.h"

#include <algorithm>
#include <numeric>

namespace fastddp {
namespace {

constexpr size_t kMostRoom = 2;  // wires

// The ranks of each node, nodes in the order of their first ranks.
std::vector<std::vector<int>> ranks_by_node(const Nodes& nodes) {
  std::vector<int64_t> seen;
  std::vector<std::vector<int>> ranks;
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    const auto place = static_cast<size_t>(std::ranges::find(seen, nodes[rank]) - seen.begin());
    if (place == seen.size()) {
      seen.push_back(nodes[rank]);
      ranks.emplace_back();
    }
    ranks[place].push_back(static_cast<int>(rank));
  }
  return ranks;
}

size_t place_of(int rank, const std::vector<int>& ranks) {
  return static_cast<size_t>(std::ranges::find(ranks, rank) - ranks.begin());
}

}  // namespace

Level all_ranks(size_t count, int rank) {
  std::vector<int> ranks(count);
  std::iota(ranks.begin(), ranks.end(), 0);
  return {std::move(ranks), static_cast<size_t>(rank), count};
}

std::vector<Level> make_levels(const Nodes& nodes, int rank) {
  const auto by_node = ranks_by_node(nodes);
  const auto size = [](const auto& ranks) { return ranks.size(); };
  const auto least = std::ranges::min(by_node, {}, size).size(), most = std::ranges::max(by_node, {}, size).size();
  if (by_node.size() == 1 || most == 1 || most > kMostRoom * least) return {all_ranks(nodes.size(), rank)};

  const auto own = static_cast<size_t>(
      std::ranges::find_if(by_node, [&](const auto& ranks) { return std::ranges::count(ranks, rank) != 0; }) - by_node.begin());
  const Level inner{by_node[own], place_of(rank, by_node[own]), least};
  if (!inner.owns_a_shard()) return {inner, {{}, by_node.size(), by_node.size()}};
  std::vector<int> owners;
  for (const auto& ranks : by_node) owners.push_back(ranks[inner.place]);
  return {inner, {std::move(owners), own, by_node.size()}};
}

}  // namespace fastddp
