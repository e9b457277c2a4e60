// The driver: takes each bucket through the stages of its trip.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "observe/timeline.h"
#include "transport/weighting.h"
#include "transport/works.h"
#include "trip/trips.h"
#include "trip/user_code.h"

namespace fastddp {

// Note [Ticks]
// In tick t bucket b enters stage t - b of its trip. So a window has a tick for each bucket, and some more. Tick t happens when
// bucket t and all earlier ones are complete, so the order of all collectives depends on the plan alone. Only the end of a bucket's
// trip has no fixed moment: as soon as the last collective is done. It starts nothing.
// The first stage runs on the stream of the bucket's last gradient, all others on side streams, so that backward goes on.
//
// Note [Wires of legs]
// Wires are made when a window first needs them, and zeroed on the stream that is current then. The codec always writes after that:
// a first leg after the bucket has waited for its producers, a later leg on a side stream. If that leg shares a wire (note
// [Messages], stage.h), the wire was made one tick before, and the side stream has waited for the streams of that tick.
// Either all ranks send from symmetric memory, or none. So there gradients do not live in the wire that travels.
//
// Note [Collectives that were started]
// If the second piece of a wire cannot be sent, the first one is still on its way. void_what_was_done() has to wait for it, and
// abandon_rest() must not send it again: other ranks would take it for the next window's. So a piece is counted as soon as it has
// started, by stage, until the window is over.
//
// Note [Room for the status]
// The status of a window (note [Status of a window], window/status.h) can travel with the gradients of the last bucket: as
// kStatusRoom numbers, which ranks add up. Then `write` is called with the room when all else is in the wire, also if the tick is
// abandoned. When the bucket has ended its trip, take_status() returns what has come: times `factor`, the sums over ranks.
//
// Note [A window that fails]
// If backward raises on a rank, that rank has started the collectives of some buckets, the other ranks those of all. Each rank
// has to start the collectives of every bucket in every window, or those of the next window would meet the missing ones. So
// before its next window, a rank whose window failed calls void_what_was_done(), and abandon_rest() in place of the ticks that it has not
// called or that raised. So it takes part without its gradients and ignores the result. A tick that raised may have started none,
// some or all of its collectives: the rest is started.

// All functions are called under the reducer's lock. It is released while users' code runs or is waited for (note [User code],
// user_code.h). No call takes the GIL, except where a user's hook runs.
class Driver {
 public:
  // `on_finished`: called when the gradients of a bucket are written, on the stream on which they were.
  Driver(Buckets& buckets, Timeline& timeline, std::mutex& lock, std::function<void(Bucket&)> on_finished)
      : buckets_(buckets), timeline_(timeline), lock_(lock), on_finished_(std::move(on_finished)) {}

  // --- Between two windows

  // What follows from a way.
  struct Next {
    std::shared_ptr<Way> way;
    std::vector<Travel> travels = {};
    Trip trip = {};
    std::vector<size_t> order = {};
  };
  // `buckets`: the present ones, or those that take their places. May run Python code, without the lock. Note [All or nothing],
  // bucket/bucket.h.
  Next prepare(std::shared_ptr<Way> way, std::vector<Bucket>& buckets) const;
  // Raises nothing.
  void take(Next next);
  const std::shared_ptr<Way>& way() const { return way_; }
  // Where the wires of coming ways come from; null: ordinary memory.
  const std::shared_ptr<const RegisteredMemory>& memory() const { return memory_; }
  void use_memory(std::shared_ptr<const RegisteredMemory> memory) { memory_ = std::move(memory); }
  // As Reducer::set_model_number(), before the first window.
  void set_model_number(size_t number) { model_ = number; }
  void set_weighting(const Weighting& weighting);
  const Weighting& weighting() const { return weighting_; }
  // The factor for gradients that travel outside of buckets, before the ranks add them up.
  double scale() const {
    const auto weighting = trip_.runs_users_code ? Weighting() : weighting_;
    return way_->all == nullptr ? 1.0 : weighting.scale(way_->all->getSize());
  }
  bool runs_users_code() const { return trip_.runs_users_code; }
  // Note [What is remembered for good], codec/codec.h.
  bool remembers() const { return trip_.codec != nullptr && trip_.codec->remembers; }
  void keep();
  void undo(const at::Tensor& only_if);

  // --- A window

  void begin_window();
  // A gradient of `bucket` is final.
  void gradient(Bucket& bucket, size_t member);
  // The bucket whose trip begins next; the number of buckets, or more: none.
  size_t next() const { return ticks_; }
  // If it raised, its next call starts only the rest.
  void tick();
  bool has_ticks_left() const { return ticks_ < ticks(); }
  // This window's tick that waits for the end of backward, with all that follow; none: those up to the last bucket do not wait.
  void wait_before(std::optional<size_t> tick) { waits_ = tick; }
  bool next_waits() const { return waits_ && ticks_ >= *waits_; }
  // Ends the trips of all buckets that have not ended yet.
  void finish_all();
  // Makes the current streams wait for all that the ends of trips have begun.
  void join();
  // The window has ended, and the current streams have waited for all of its work: note [Lent wires], bucket/wire.h.
  void give_back();
  // No rank used the parameter, so this window's result for its placeholder will be dropped.
  void discard(Bucket& bucket, size_t member);
  // Note [Late gradients], reducer/closing.h. Starts to average the wire of `bucket`, which is not one of the plan's, on the
  // current stream, which has waited for the side streams. The wire holds unscaled gradients. The returned function waits and
  // leaves the average in the wire. If start_late() raises, it has started nothing.
  std::function<void()> start_late(Bucket& bucket) const { return trip_.late(bucket, scale()); }

  // The bucket whose collective has failed in this window; none: none has.
  std::optional<size_t> failing() const { return failing_; }
  // The tick in which the status travels with gradients; none: it has to travel by itself.
  std::optional<size_t> status_tick() const { return trip_.has_status ? std::optional(ticks() - 1) : std::nullopt; }
  using WriteStatus = std::function<void(const at::Tensor& room)>;
  void status_is_written_by(WriteStatus write) { write_status_ = std::move(write); }
  struct Status {
    at::Tensor sums;
    double factor;
  };
  Status take_status();

  // --- A window that fails, or in which this rank has no part: note [A window that fails]

  // Waits for all collectives in flight, forgets them, and zeroes what they may have written. Drops their errors and results. Undoes
  // all that codecs remember of the step. Gradients may have changed since the window failed, or be gone.
  void void_what_was_done();
  // In place of the ticks and ends that are left. Sends `value` in place of gradients, except where other ranks' state would depend
  // on it. Neither reads nor writes gradients or wires that they may live in. A rank that has joined (torch's Join) does the same
  // with zeros.
  void abandon_rest(double value);
  // In the middle of a window, before the buckets are destroyed.
  void leave_behind();
  // What may be on its way, and its memory.
  const std::vector<Travel>& travels() const { return travels_; }

 private:
  size_t lag() const { return trip_.stages.empty() ? 0 : trip_.stages.size() - 1; }
  size_t ticks() const { return travels_.size() + lag(); }

  void enter_stages(size_t tick, std::optional<double> void_value);
  Travel* entering(size_t tick, size_t stage);
  void enter(Travel& travel, size_t stage, std::optional<double> void_value);
  void make_wire(Travel& travel, size_t leg);
  void cut(Travel& travel, size_t stage, const at::Tensor& travels);
  void start(Travel& travel, size_t stage);
  void start_shared(size_t tick);
  void complete(size_t stage, Piece& piece);
  void arrive(Travel& travel, size_t stage);
  void tell_when_arrived(Travel& travel);
  bool has_arrived(Travel& travel);
  void finish_arrived();
  void finish_next();
  void forget(Travel& travel);
  at::Tensor room_for_status(const Travel& travel, size_t stage, const at::Tensor& wire) const;
  void write_status(const Travel& travel, size_t stage, const at::Tensor& wire);
  void make_void(Travel& travel, size_t stage, double value);
  void overwrite(Travel& travel, size_t stage, double value);
  void recover(Travel& travel);
  void drain();
  // What is released while users' code is waited for; null: there is none.
  std::mutex* lock_of_users() const { return trip_.runs_users_code ? &lock_ : nullptr; }

  Buckets& buckets_;
  Timeline& timeline_;
  std::mutex& lock_;
  const std::function<void(Bucket&)> on_finished_;
  std::shared_ptr<Way> way_;
  std::shared_ptr<const RegisteredMemory> memory_;
  Weighting weighting_;
  size_t model_ = 0;
  Trip trip_;
  std::vector<Travel> travels_;  // by bucket
  std::vector<size_t> order_;    // of stages in a tick
  bool is_captured_ = false;     // a window was captured, and its graph uses the wires
  WhoWaits who_waits_;
  // This window's.
  size_t ticks_ = 0;
  size_t finished_ = 0;  // buckets
  std::optional<size_t> waits_, failing_;
  bool in_window_ = false;     // a tick has begun
  bool was_drained_ = false;   // the window has failed here, so nothing of it is left to relay
  bool is_of_others_ = false;  // this rank has no inputs in it
  at::Tensor status_;          // what travels, or has come
  WriteStatus write_status_;
};

}  // namespace fastddp
