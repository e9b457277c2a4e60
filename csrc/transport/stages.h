// What ranks do together with shards of a wire: add each of them up at its owner, and give the sums to all.
#pragma once

#include <memory>
#include <vector>

#include "codec/adder.h"
#include "transport/lanes.h"
#include "transport/levels.h"
#include "transport/works.h"

namespace fastddp {

// Of one part of a wire, by owner. They may have different lengths, and none.
using Shards = std::vector<at::Tensor>;

// A part of a wire that travels by itself.
struct Piece {
  Piece(uint32_t tag, size_t bucket) : tag(tag), bucket(bucket) {}

  at::Tensor wire;      // one-dimensional; undefined when nothing of it is on its way
  uint32_t tag;         // unique among the pieces that travel over the same group
  size_t bucket;        // whose gradients it has; the greatest of them
  at::Tensor room;      // for other ranks' data; kept from window to window
  at::Tensor sum;       // if there is an adder, for the sum, laid out like the wire; may be the room
  Shards shards;        // parts of `wire`, for a transport that cuts them in each window
  Works works;          // of the round that travels
  Works acks;           // are here when other ranks no longer need memory of this piece: note [Reads], reads.h
  size_t sent = 0;      // how many messages of a round have started, if starting the next one failed
  size_t added_up = 0;  // how many rounds
};

// Rounds may overlap in a group: a tag tells those of a piece apart.
constexpr uint32_t kMostRounds = 4;

// Where the sum of this rank's shard goes, and what adds it up.
struct Sum {
  at::Tensor target;  // may be this rank's own shard
  Adder* adder;       // null: numbers of the shard's dtype
  bool is_last;       // the same ranks do not spread what comes of it
};

// Two stages over the ranks of a level: start_sum() and then add_up(), a reduce-scatter; start_spread(), an all-gather. All
// ranks of the level start the same, whatever is in the wire. They append to `piece.works` what they start, one by one, and
// leave out the first `piece.sent`. Before the piece's memory is used again, the caller waits for `piece.acks`.
class Stages {
 public:
  explicit Stages(Level level) : level_(std::move(level)) {}
  virtual ~Stages() = default;

  // The shard is this rank's to add up.
  bool owns_a_shard() const { return level_.owns_a_shard(); }

  virtual void start_sum(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards, const Sum& sum) const = 0;
  // The current stream has waited for start_sum().
  virtual void add_up(const Piece& piece, const Shards& shards, const Sum& sum) const = 0;
  virtual void start_spread(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const = 0;

 protected:
  const Level level_;
};

// Note [Shards over gloo]
// Gloo's all-gather copies through its own memory, twice. Its all-to-all sends before it says that it can receive. A rank
// that is a little late then says so after its own data, and the two directions of the connection take turns. Messages between
// pairs of ranks, receives started first, use both directions at once and copy nothing. They take host memory only, and do not
// check what they are given. Gloo's collectives take memory of a GPU through the host.
// Where all ranks of the level may read each other's memory, they do that in place of messages: note [Reads], reads.h.
std::unique_ptr<Stages> make_pairs(Level level, const Lanes& lanes);

// One all-to-all, and sums of our own: in fp32 for 16 bits, or the adder's. Shards that are no equal parts of the wire, in the order
// of ranks, are copied first.
std::unique_ptr<Stages> make_all_to_all(Level level);

// Reduce-scatter and all-gather of the process group; a collective for each shard where these are no equal parts of the wire.
std::unique_ptr<Stages> make_collectives(Level level);

// Whether messages between pairs of ranks are for tensors on this device.
bool goes_in_pairs(c10d::ProcessGroup& group, c10::Device device);

// The stages that fit the lanes and the device, over all ranks. `own_sums`: ranks add up themselves.
std::unique_ptr<Stages> make_stages(const Lanes& lanes, c10::Device device, bool own_sums);

}  // namespace fastddp
