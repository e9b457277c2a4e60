// Which ranks exchange shards with which, so that few bytes leave a node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastddp {

// By rank of a process group: a number for each machine.
using Nodes = std::vector<int64_t>;

// Ranks among which a part of a wire is cut into shards: the first of them own one each, and add it up.
struct Level {
  std::vector<int> ranks;  // of the process group; in the same order on each of them
  size_t place;            // this rank is ranks[place]
  size_t shards;

  bool owns_a_shard() const { return place < shards; }
};

// Note [Two levels]
// Where all ranks send each other shards, each rank of a node sends to every rank of the others: with m ranks a node, m
// times the bytes of a ring leave it. So ranks of one node first add up among themselves. What they own then travels
// between the nodes, as many bytes as one rank would send if each node had a single one, and comes back the same way.
//
// It takes two rounds more, and each value is rounded once more, between the levels. What a rank sends and receives in all
// is the same. As many ranks of each node own a shard as the smallest node has ranks, since owners of the same shard meet. An
// owner needs room for what all ranks of its node send: at most twice the wire, or there is one level. There is one, too, where
// one of the two would have nothing to do.
//
// The outer level is the last; a part of it is this rank's shard of the one before. Ranks that own none have no part in it.
std::vector<Level> make_levels(const Nodes& nodes, int rank);

}  // namespace fastddp
