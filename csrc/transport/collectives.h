// What ranks do with a wire in one tick: an allreduce, or one of its two halves.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bucket/sharding.h"
#include "transport/lanes.h"
#include "transport/owners.h"

namespace fastddp {

// All ranks start the same ones, in the same order, whatever is in the wire. A collective knows nothing of gradients.
class Collective {
 public:
  explicit Collective(Lanes lanes, bool takes_room = false) : lanes(std::move(lanes)), takes_room(takes_room) {}
  virtual ~Collective() = default;

  const Lanes lanes;
  // Whether `Piece::room` is laid out like the wire, so that the caller may provide it.
  const bool takes_room;

  // Starts it for a piece of a wire, except its first `piece.sent` messages. Appends each one to `piece.works` when it has started,
  // so that those in flight are known even if the next one fails to start.
  virtual void start(c10d::ProcessGroup& lane, Piece& piece) const = 0;
  // The current stream has waited for it: adds up what has come.
  virtual void add_up(Piece& piece) const {}
  // Between windows: gives back memory that outlives pieces.
  virtual void give_room_back() const {}
};

// Adds up in the wire's dtype, or averages if `piece.averages`.
std::shared_ptr<const Collective> make_all_reduce(Lanes lanes);

// Note [Halves of a sum]
// A sum over ranks has two halves. Each rank of a level owns a part of the wire, its shard or *run*: first all send it their numbers
// for it, and it adds them up; then it sends the sum to all. Runs may differ in length, and may be empty. With shards of our own,
// 16 bits are added up in fp32: this sends half the bytes of fp32, and each value is rounded twice, whatever the number of ranks,
// by pack and after the sum. Over several nodes with several ranks each there are two levels, so four halves, and three roundings:
// note [Two levels], levels.h. A sharded optimizer leaves the second half out.

// Cuts a wire of a bucket into shards, by owner. None: this rank has no part in it.
using Cut = std::function<Shards(const at::Tensor& wire, size_t bucket)>;
inline Cut runs_of(std::shared_ptr<Sharding> sharding) {
  return [sharding = std::move(sharding)](const at::Tensor& wire, size_t bucket) { return sharding->cut(wire, bucket); };
}
// The shards of level number `level`: of what is this rank's in the levels before.
Cut shards_of(std::vector<Level> levels, size_t level);

struct Halves {
  std::shared_ptr<const Owners> owners;
  Cut cut;
  Adder* adder = nullptr;  // null: wires are numbers of their dtype
  int64_t unit = 1;        // of what is added up, as in Sum
};
// `round`: tells the messages of a wire's collectives apart. `is_last`: no second half over the same owners follows. `shares_room`:
// wires that are not on their way at the same time use the same memory for what comes.
std::shared_ptr<const Collective> make_to_owners(Lanes lanes, Halves halves, size_t round, bool is_last,
                                                 bool shares_room = false);
std::shared_ptr<const Collective> make_from_owners(Lanes lanes, Halves halves, size_t round);

}  // namespace fastddp
