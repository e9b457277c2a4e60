// How wires travel between ranks, and what adds them up.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "codec/adder.h"
#include "transport/average.h"
#include "transport/lanes.h"
#include "transport/levels.h"
#include "transport/works.h"

namespace fastddp {

// A part of a wire that travels by itself.
struct Piece {
  at::Tensor wire;  // one-dimensional; undefined when nothing of it is on its way
  uint32_t tag;     // of no other piece that travels over the same group
  at::Tensor room;  // for what other ranks send, and for the sum where there is an adder; kept from window to window
  Works works;      // of the round that travels
  size_t sent = 0;  // how many messages of a round are on their way, where the next one could not be started
  size_t added_up = 0;  // rounds
  size_t message = 0;   // the number of the wire
};

// A wire travels in rounds, all ranks go through all of them. Knows ranks, groups and what is added up; knows nothing of
// gradients.
class Transport {
 public:
  explicit Transport(Lanes lanes) : lanes_(std::move(lanes)) {}
  virtual ~Transport() = default;

  const Lanes& lanes() const { return lanes_; }

  // What the gradients of coming windows count.
  virtual void set_average(const Average& average) { average_ = average; }

  // How what travels is added up, if these are no numbers of the wire's dtype: by ranks, so that the transport has to send shards.
  // The sum is then in `Piece::room`, laid out like the wire, and the wire is left as it is. Before split(), for good.
  virtual void set_adder(Adder* adder) { adder_ = adder; }

  // What gradients are multiplied by before the ranks add them up: note [The scale], average.h.
  double scale() const { return average_.scale(lanes_.ranks()); }

  // The same for a wire of this dtype, which start() sends: less, where a collective does a part of it.
  virtual double scale_before(c10::ScalarType wire) const { return scale(); }

  // The elements of a wire, and of its pieces, are a multiple of this.
  virtual int64_t unit() const { return 1; }

  virtual size_t rounds() const { return 1; }

  // Whether `Piece::room` is laid out like the wire, so that it may be given.
  virtual bool takes_room() const { return false; }

  // And no messages between pairs of ranks, which are numbered otherwise.
  virtual bool sends_collectives() const { return true; }

  // What travels by itself.
  virtual std::vector<at::Tensor> split(const at::Tensor& wire) const = 0;

  // Appends to `piece.works` what it starts, one by one: what is in flight is known even if the next one cannot be started.
  // Of the round it leaves out the first `piece.sent`.
  virtual void start(size_t round, c10d::ProcessGroup& lane, Piece& piece) const = 0;

  // Behind a round that is not the last: what has come is added up in the place of this rank's own share.
  virtual void add_up(size_t round, c10d::ProcessGroup& lane, const Piece& piece) const {}

  // The ranks' sum is in the piece's wire: of a window that goes well up to here. The current stream has waited for it.
  virtual void note_came(const Piece& piece) const {}

 protected:
  const Lanes lanes_;
  Adder* adder_ = nullptr;  // null: numbers of the wire's dtype
  Average average_;
};

// The ranks' sum in the wire's dtype: one allreduce a piece. `divides`: the collective averages, so that gradients that live
// in their wire need no kernel. For groups whose average multiplies before it adds; the same on all ranks, whatever
// their gradients are.
std::unique_ptr<Transport> make_all_reduce(Lanes lanes, bool divides = false);

// The sum of wires of 16 bits in fp32, for tensors on this device. `nodes` says which ranks share a machine.
//
// Note [Sharded sums]
// An allreduce in two halves, with a sum of our own between them: rank r receives shard r of every rank's wire, adds them up
// in fp32, and sends the result to all. Half the bytes of fp32 travel, and each value is rounded twice, whatever the number
// of ranks: once by pack and once after the sum. Over several nodes with several ranks each there are four quarters and
// three roundings: note [Two levels], levels.h.
//
// Note [Shards over gloo]
// Gloo's all-gather goes through memory of its own, twice. Its all-to-all starts to send before it has said that it can
// receive; a rank that is a little late then says so behind its own data, and the two directions of the wire take turns.
// Messages between pairs of ranks, first those that are to be received, use both at once and copy nothing. They know
// host memory only, without asking what they are given; gloo's collectives take memory of a GPU through the host.
std::unique_ptr<Transport> make_sharded_sum(Lanes lanes, const Nodes& nodes, c10::Device device);

}  // namespace fastddp
