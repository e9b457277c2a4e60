// How wires travel between ranks, and what adds them up.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bucket/sharding.h"
#include "transport/lanes.h"
#include "transport/stages.h"
#include "transport/weighting.h"

namespace fastddp {

// Cuts a bucket's wire into runs, by rank of the group.
using Cut = std::function<Shards(const at::Tensor& wire, size_t bucket)>;
inline Cut runs_of(std::shared_ptr<Sharding> sharding) {
  return [sharding = std::move(sharding)](const at::Tensor& wire, size_t bucket) { return sharding->cut(wire, bucket); };
}

// A wire travels in *rounds*, and all ranks go through all rounds. A transport knows ranks, groups and how to add up. It knows
// nothing of gradients.
class Transport {
 public:
  explicit Transport(Lanes lanes) : lanes_(std::move(lanes)) {}
  virtual ~Transport() = default;

  const Lanes& lanes() const { return lanes_; }

  // Sets the kind of average for the windows that follow.
  virtual void set_weighting(const Weighting& weighting) { weighting_ = weighting; }

  // `adder` adds up wires that are not numbers of their dtype. Ranks call it, so the transport has to send shards. The sum is
  // then in `Piece::sum`, and the wire stays as it is. Called once, before split().
  virtual void set_adder(Adder* adder) { adder_ = adder; }

  // The factor for gradients before the ranks add them up: note [The scale], weighting.h.
  double scale() const { return weighting_.scale(lanes_.ranks()); }

  // The same for a wire of this dtype that start() sends, without the factor that a collective applies itself.
  virtual double scale_before(c10::ScalarType wire) const { return scale(); }

  // The elements of a wire, and of its pieces, are a multiple of this.
  virtual int64_t unit() const { return 1; }

  virtual size_t rounds() const { return 1; }

  // Whether `Piece::room` is laid out like the wire, so that the caller may provide it.
  virtual bool takes_room() const { return false; }

  // False: it sends messages between pairs of ranks, which are numbered in another way.
  virtual bool sends_collectives() const { return true; }

  // Whether all ranks have the sum of all at the end, or each rank that of its run.
  virtual bool gives_the_sum_to_all() const { return true; }

  // The half of this transport that leaves each rank with the sum of its run; null: it has no halves.
  virtual std::unique_ptr<Transport> only_sum(c10::Device device, Cut cut) const { return nullptr; }

  // The pieces of a wire.
  virtual std::vector<at::Tensor> split(const at::Tensor& wire) const = 0;

  // Starts a round, except its first `piece.sent` messages. Appends each one to `piece.works` when it has started, so that
  // those in flight are known even if the next one fails to start.
  virtual void start(size_t round, c10d::ProcessGroup& lane, Piece& piece) const = 0;

  // After a round: adds up the data that has come, in the place of this rank's own shard.
  virtual void add_up(size_t round, Piece& piece) const {}

  // Between windows: gives back memory that outlives pieces.
  virtual void give_room_back() const {}

 protected:
  const Lanes lanes_;
  Adder* adder_ = nullptr;  // null: wires are numbers of their dtype
  Weighting weighting_;
};

// Adds up in the wire's dtype, by one allreduce for each piece. `divides`: the collective averages, so that gradients that live
// in their wire need no kernel. Only for groups whose average multiplies before it adds. It has to be the same on all ranks,
// whatever their gradients are.
std::unique_ptr<Transport> make_all_reduce(Lanes lanes, bool divides = false);

// Adds up wires of 16 bits in fp32, and over gloo on the CPU others in their dtype, for tensors on this device. `nodes` says which
// ranks share a machine.
//
// Note [Sharded sums]
// A sharded sum is an allreduce in two halves, with our own sum between them. Rank r receives shard r of every rank's wire, adds
// the shards up in fp32, and sends the result to all ranks. This sends half the bytes of fp32. Each value is rounded twice,
// whatever the number of ranks: by pack, and after the sum. Over several nodes with several ranks each there are four rounds
// and three roundings: note [Two levels], levels.h.
std::unique_ptr<Transport> make_sharded_sum(Lanes lanes, const Nodes& nodes, c10::Device device);

// Note [Runs of a wire]
// Each rank of a group owns a part of every wire, its *run*. Runs may differ in length, and may be empty. `make_shard_sum` gives
// each owner the sum of its run over the ranks of the group, in the wire's dtype (our own sum adds 16 bits up in fp32).
// `make_shard_spread` sends what the owner has made of it to the others. In two levels the group is a node.

struct SumOfRuns {
  bool own_sums;  // ranks add up themselves, as in a sharded sum
  int64_t ranks;  // of all nodes: the average is over these, and multiplied by `times`
  double times;
  bool is_last;  // no spread follows
};
std::unique_ptr<Transport> make_shard_sum(Lanes lanes, c10::Device device, Cut cut, SumOfRuns how);
std::unique_ptr<Transport> make_shard_spread(Lanes lanes, c10::Device device, Cut cut);

}  // namespace fastddp
