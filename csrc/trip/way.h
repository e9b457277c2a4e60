// How gradients travel.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "codec/codec.h"
#include "transport/registered_memory.h"
#include "trip/hook.h"

namespace fastddp {

// Note [Two levels of a bucket]
// A bucket's wire has the gradients' dtype, and gradients live there as usual. First it goes over the ranks of the node, which add
// up its runs (note [Halves of a sum], transport/collectives.h). Then this rank's run goes over the ranks in the same place of
// other nodes, as the codec writes it: the run's spans are its gradients. If the codec sends numbers of the gradients' dtype, the
// run travels as it is, and nothing is copied. In the end the result goes back to the ranks of the node. With a sharded optimizer
// that is left out: the result is for this rank's spans alone (note [Sharded gradients], bucket/shard.h).
//
// The averaging factor is applied once, at pack, and the stages between nodes add up. A codec that remembers what it left out needs
// averages over nodes, so pack multiplies by the number of nodes as well.
//
// Note [Two levels of a window that fails]
// Until a rank fails, it has taken part between nodes with its runs of some buckets. After that, its stages between nodes are void
// (note [A window that fails], driver.h), and so is what it sends inside the node. Its neighbours encode sums that contain what it
// sent there, and their codecs remember the loss. So if the codec remembers, these are zeros, and other ranks notice by the
// status alone. A rank without inputs owes other nodes the sums of its neighbours. It does everything as in any window, with
// zeros for its gradients.

// Made by Python, but for a reducer's first one. It belongs to one reducer.
struct Way {
  // All ranks of the average; null: each rank keeps its own gradients.
  c10::intrusive_ptr<c10d::ProcessGroup> all;
  std::shared_ptr<Codec> codec = nullptr;
  // Over which wires go; in two levels, those between nodes.
  std::optional<Lanes> lanes = {};
  Nodes nodes = {};      // of the lanes' ranks, which add up themselves; empty: allreduces
  bool divides = false;  // an allreduce may average; the same on all ranks
  // Which rank has what: of the optimizer, or in two levels of each node.
  std::shared_ptr<Sharding> sharding = nullptr;
  // By bucket. There are some: a rank gets the averages of its own run alone (note [Sharded gradients], bucket/shard.h).
  std::vector<std::shared_ptr<Shard>> shards = {};
  bool steps_optimizers = false;   // the hook lets an optimizer step inside backward
  std::optional<Lanes> node = {};  // two levels: the ranks of the node
  std::shared_ptr<Hook> hook = nullptr;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> hook_groups = {};  // that it may send over, too

  bool is_taken = false;  // by a reducer

  bool keeps_runs() const { return !shards.empty(); }
  // All groups that it sends over.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const;
  // Collectives of buckets are dealt over lanes in turn. Null: there are fewer lanes, or buckets do not travel by collectives.
  c10d::ProcessGroup* lane(size_t number, c10::Device device) const;
  // Lets ranks that read each other's memory meet, once: all ranks call it together (note [Reads], transport/reads.h).
  void meet(c10::Device device);

  std::vector<Level> levels = {};  // of the lanes' ranks
  std::vector<std::shared_ptr<const Owners>> level_owners = {};
  std::shared_ptr<const Owners> run_owners = nullptr;
};

}  // namespace fastddp
