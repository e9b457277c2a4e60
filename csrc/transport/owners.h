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

// Of a piece of a bucket's wire, or of parameters that are gathered. Without the model, pieces of another one that come first would pass
// for its own. Those of one model come in one order, so distant ones may share a tag.
inline uint32_t tag_of(bool is_gathered, size_t model, size_t bucket, size_t piece = 0) {
  constexpr size_t models = 1 << 9, pieces = 1 << 17;
  const auto number = (bucket * kMostPieces + piece) % pieces;
  return static_cast<uint32_t>(((is_gathered ? models : 0) + model % models) * pieces + number);
}

// A part of a wire that travels by itself.
struct Piece {
  Piece(uint32_t tag, size_t bucket) : tag(tag), bucket(bucket) {}

  at::Tensor wire;        // one-dimensional; undefined when nothing of it is on its way
  uint32_t tag;           // tag_of()
  size_t bucket;          // whose gradients it has; the greatest of them
  at::Tensor room;        // for other ranks' data; kept from window to window
  at::Tensor sum;         // if the codec keeps what was sent, for the sum, laid out like the wire; may be the room
  Shards shards;          // parts of `wire` or of the sum, as the collective on its way has cut them
  bool averages = false;  // an allreduce divides by the number of ranks, too
  Works works;            // of the round that travels
  Works acks;             // are here when other ranks no longer need memory of this piece: note [Reads], reads.h
  size_t sent = 0;        // how many messages of a round have started, if starting the next one failed
  size_t added_up = 0;    // how many stages of its trip
};

// Rounds may overlap in a group: a tag tells those of a piece apart.
constexpr uint32_t kMostRounds = 4;

// Where the sum of this rank's shard goes, and what adds it up.
struct Sum {
  at::Tensor target;  // may be this rank's own shard
  Adder* adder;       // null: numbers of the shard's dtype
  int64_t unit;       // a shard may be added up in parts of multiples of so many elements
  bool is_last;       // the same ranks do not spread what comes of it
};

// Two stages over the ranks of a level: start_sum() and then add_up(), a reduce-scatter; start_spread(), an all-gather. All
// ranks of the level start the same, whatever is in the wire. They append to `piece.works` what they start, one by one, and
// leave out the first `piece.sent`. Before the piece's memory is used again, the caller waits for `piece.acks`.
class Owners {
 public:
  explicit Owners(Level level) : level_(std::move(level)) {}
  virtual ~Owners() = default;

  // The shard is this rank's to add up.
  bool owns_a_shard() const { return level_.owns_a_shard(); }
  // This rank's among the owners.
  size_t place() const { return level_.place; }
  // As Collective::takes_room.
  virtual bool takes_room() const { return false; }

  virtual void start_sum(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards, const Sum& sum) const = 0;
  // The current stream has waited for start_sum().
  virtual void add_up(const Piece& piece, const Shards& shards, const Sum& sum) const = 0;
  virtual void start_spread(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const = 0;

 protected:
  const Level level_;
};

// target = the sum of `parts`, what each rank of the level has of this rank's shard, or of a part of the shard. `target` may be this
// rank's own. Those of other ranks may be written to.
void sum_parts(const Level& level, size_t bucket, const Shards& parts, const at::Tensor& target, Adder* adder);

// Note [Shards over gloo]
// Gloo's all-gather copies through its own memory, twice. Its all-to-all sends before it says that it can receive. A rank
// that is a little late then says so after its own data, and the two directions of the connection take turns. Messages between
// pairs of ranks, receives started first, use both directions at once and copy nothing. They take host memory only, and do not
// check what they are given. Gloo's collectives take memory of a GPU through the host.
// Where all ranks of the level may read each other's memory, they do that in place of messages: note [Reads], reads.h.
std::shared_ptr<const Owners> make_pairs(Level level, const Lanes& lanes);

// One all-to-all, and sums of our own: in fp32 for 16 bits, or the adder's. Shards that are no equal parts of the wire, in the order
// of ranks, are copied first.
std::shared_ptr<const Owners> make_all_to_all(Level level);

// Reduce-scatter and all-gather of the process group; a collective for each shard where these are no equal parts of the wire.
std::shared_ptr<const Owners> make_collectives(Level level);

// Whether messages between pairs of ranks are for tensors on this device.
bool goes_in_pairs(c10d::ProcessGroup& group, c10::Device device);

// The stages that fit the lanes and the device, over all ranks. `own_sums`: ranks add up themselves.
std::shared_ptr<const Owners> make_owners(const Lanes& lanes, c10::Device device, bool own_sums);

}  // namespace fastddp
