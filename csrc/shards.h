// How the shards of a wire travel, where ranks add up themselves: shard r of every rank's wire to rank r, and back.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "in_flight.h"
#include "levels.h"

namespace fastddp {

// What a rank receives of a piece of a wire.
struct Received {
  uint32_t tag;     // of no other piece that travels over the same group
  at::Tensor room;  // for shards; undefined before the first window
  // How many messages or collectives of a round are on their way, where the next one could not be started.
  size_t started = 0;
};

// A piece is a flat tensor. It travels in rounds, first those that scatter shards to the ranks that add them up, then as
// many that gather the sums; all ranks go through all of them.
class Shards {
 public:
  virtual ~Shards() = default;

  // The elements of a piece are a multiple of this.
  virtual int64_t unit() const = 0;

  virtual size_t rounds() const = 0;

  // Appends to `works` what it starts, one by one: what is in flight is known even if the next one cannot be started. Of the
  // round it leaves out the first `received.started`.
  virtual void start(size_t round, c10d::ProcessGroup& group, const at::Tensor& piece, Received& received,
                     Works& works) const = 0;

  // Behind a round: what it has scattered is added up in fp32 and rounded once. The sum replaces this rank's own shard.
  virtual void add_up(size_t round, c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const = 0;
};

// For tensors on this device, over groups that have this backend for it, on this one of their ranks.
//
// Note [Shards over gloo]
// Gloo's all-gather goes through memory of its own, twice. Its all-to-all starts to send before it has said that it can
// receive; a rank that is a little late then says so behind its own data, and the two directions of the wire take turns.
// Messages between pairs of ranks, first those that are to be received, use both at once and copy nothing. They know
// host memory only, without asking what they are given; gloo's collectives take memory of a GPU through the host.
std::unique_ptr<Shards> make_shards(const std::string& backend, c10::Device device, const Nodes& nodes, int rank);

}  // namespace fastddp
