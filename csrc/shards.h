// How the shards of a wire travel, where ranks add up themselves: shard r of every rank's wire to rank r, and back.
#pragma once

#include <memory>

#include "in_flight.h"

namespace fastddp {

// What a rank receives of a piece of a wire.
struct Received {
  uint32_t tag;       // of no other piece that travels over the same group
  at::Tensor shards;  // as long as the piece; undefined before the first window
};

// A piece is a flat tensor, one shard for each rank.
class Shards {
 public:
  virtual ~Shards() = default;

  // Everybody's shard r travels to rank r.
  virtual Works scatter(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const = 0;

  // Behind it: rank r adds up, in fp32, what there is of shard r, and rounds once.
  virtual void add_up(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const = 0;

  // The sum travels from rank r to everybody's place of shard r.
  virtual Works gather(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const = 0;
};

// Note [Shards over gloo]
// Gloo's all-gather goes through memory of its own, twice. Its all-to-all starts to send before it has said that it can
// receive; a rank that is a little late then says so behind its own data, and the two directions of the wire take turns.
// Messages between pairs of ranks, first those that are to be received, use both at once and copy nothing.
std::unique_ptr<Shards> make_shards(const std::string& backend);

}  // namespace fastddp
