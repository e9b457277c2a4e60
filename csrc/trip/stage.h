// A bucket's trip: the stages that it goes through, and where it is.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bucket/buckets.h"
#include "codec/codec.h"
#include "transport/collectives.h"

namespace fastddp {

struct Travel;
struct Way;

// Made once a plan, by make_trip() (trips.h), which alone knows of levels, sharding and hooks.
struct Stage {
  // Writes a wire, on the current stream, and returns what of it travels (steps.h). Null: the wire of the stage before goes on.
  at::Tensor (*write)(const Way& way, Travel& travel) = nullptr;
  // Starts with the pieces of the wire. Null: nothing does.
  std::shared_ptr<const Collective> sends = nullptr;
  // Of a stage that writes: how its wire is cut, for this stage and those that pass it on.
  std::function<Shards(const at::Tensor& wire)> pieces = nullptr;
  // It writes the wire of this leg of the codec, where the bucket has legs; else the bucket's own, or a part of it.
  std::optional<size_t> leg = {};
  // What travels in a window that fails, in place of a wire that is not the codec's. Undefined: nothing.
  at::Tensor (*instead)(const Way& way, Travel& travel, double value) = nullptr;
  // Carries gradients of other ranks, so these need it from a rank without inputs, too.
  bool is_relayed = false;
};

// A wire on its way, through stage `first`, which writes it, and those that pass it on.
struct Flight {
  size_t first;
  at::Tensor travels;           // the wire, a part of it, or what is sent instead; it stays while it is the same
  std::vector<Piece> pieces;    // of it; kept from window to window, for their room
  std::vector<size_t> started;  // pieces, by stage: note [Collectives that were started], driver.h
  bool is_void = false;         // something else travels in place of gradients

  void forget_wire() {
    travels.reset();
    for (auto& piece : pieces) piece.wire.reset();
  }
};

struct Travel {
  Bucket* bucket;
  Outline outline;               // what the bucket becomes when the way is taken
  Spans spans;                   // what the codec encodes: of the bucket; in two levels, of this rank's run of it
  std::vector<size_t> all = {};  // numbers of its spans
  std::vector<Leg> legs = {};    // none: the bucket's own wire travels
  std::vector<Wire> wires = {};  // by leg
  double scale = 1.0;            // of gradients, where they are written first
  double codec_scale = 1.0;      // of what the codec encodes; in one level, that is the same
  bool may_average = false;      // an allreduce may divide in place of that scale, and rounds alike
  bool averages = false;         // it does
  bool encodes_on_arrival = false;
  std::vector<Flight> flights = {};
  std::vector<size_t> flight_of = {};  // by stage
  // By stage: whose flight carries the bucket, and in which stage of its own. Another bucket's, where it shares a wire.
  struct Carrier {
    Travel* travel;
    size_t stage;
  };
  std::vector<Carrier> carriers = {};
  // In two levels: where in the bucket's wire the part begins that has all its spans, and how long it is; the wire of which their
  // gradients are parts, and the part.
  std::pair<int64_t, int64_t> extent = {};
  at::Tensor bound = {}, run = {};
  bool is_decoded = false;

  Flight& at(size_t stage) { return flights[flight_of[stage]]; }
  bool is_carried(size_t stage) const { return carriers[stage].travel != this; }
  // What carries it.
  std::vector<Piece>& pieces(size_t stage) { return carriers[stage].travel->at(carriers[stage].stage).pieces; }
  // The leg whose wire the stage writes; null: the bucket's own.
  Wire* wire_of(const Stage& stage) { return stage.leg && *stage.leg < wires.size() ? &wires[*stage.leg] : nullptr; }
};

// Note [Messages]
// A leg of a bucket travels after the leg before has gone through all its stages. So in each tick the first leg of one bucket
// starts, and the second leg of an earlier one. They share a wire, if they have one dtype, and so a collective: in each window
// PowerSGD takes one collective for each bucket, and one more.
struct Shared {
  size_t first, second;  // stages that write the two legs
  size_t of_a_leg;       // stages
};

// The bucket whose second leg shares the wire of the first leg of number `bucket`; null: none.
Travel* guest_of(std::vector<Travel>& travels, const std::optional<Shared>& shared, size_t bucket);
// The bucket whose first leg shares its wire with the second one of number `bucket`; null: none.
Travel* host_of(std::vector<Travel>& travels, const std::optional<Shared>& shared, size_t bucket);

// Numbers: note [Room for the status], driver.h.
inline constexpr int64_t kStatusRoom = 102;

struct Trip {
  std::vector<Stage> stages;
  std::shared_ptr<Codec> codec;
  std::optional<Shared> shared;
  // A gradient of the bucket is final; its stages follow when all are.
  void (*gradient)(const Way& way, Travel& travel, size_t member) = nullptr;
  // The last stage's sum has come: writes the gradients.
  void (*end)(const Way& way, Travel& travel) = nullptr;
  // In its place where the window has failed.
  void (*recover)(const Way& way, Travel& travel) = nullptr;
  // Averages a bucket that is not one of the plan's, with this scale: Driver::start_late().
  std::function<std::function<void()>(Bucket&, double scale)> late;
  bool has_status = false;       // note [Room for the status], driver.h
  bool runs_users_code = false;  // which scales gradients itself, if it wants to
  bool ends_for_others = false;  // where this rank has no inputs, its buckets end as in any window
  // In two levels: pack multiplies by this too, and the codec's scale takes it back (note [Two levels of a bucket], way.h).
  std::optional<double> times = {};
};

}  // namespace fastddp
