// Decides which ranks exchange shards with each other, so that few bytes leave a node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastddp {

// By rank of a process group: the number of its machine.
using Nodes = std::vector<int64_t>;

// Ranks that share a part of a wire, cut into shards. The first ranks own one shard each, and add it up.
struct Level {
  std::vector<int> ranks;  // of the process group; in the same order on each rank of the level
  size_t place;            // this rank is ranks[place]
  size_t shards;

  bool owns_a_shard() const { return place < shards; }
  // Calls function(place) for the first `count` ranks but this one. Each rank begins with the next one, or all would begin with the
  // same.
  template <typename Function>
  void for_others(size_t count, const Function& function) const {
    for (size_t step = 1; step < ranks.size(); ++step) {
      const auto other = (place + step) % ranks.size();
      if (other < count) function(other);
    }
  }
};

// Note [Two levels]
// With one level, each rank of a node sends shards to every rank of the other nodes. With m ranks a node, m times the bytes of
// a ring leave the node. So the ranks of one node first add up among themselves. Only their shards then travel between the
// nodes, as many bytes as if each node had a single rank. The sums come back the same way.
//
// Two levels take two more rounds, and round each value once more, between the levels. A rank sends and receives as many bytes
// as with one level. Owners of the same shard meet, so each node has as many owners as the smallest node has ranks. An owner
// needs room for the data of all ranks of its node. There is one level if that would be more than twice the wire, or if one of
// the two levels would have nothing to do.
//
// The outer level comes last. It shards this rank's shard of the inner level. Ranks that own no shard have no part in it.
// One level of all ranks.
Level all_ranks(size_t count, int rank);
std::vector<Level> make_levels(const Nodes& nodes, int rank);

}  // namespace fastddp
