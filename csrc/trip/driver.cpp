#include "trip/driver.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "bucket/bucket_range.h"
#include "bucket/packing.h"
#include "device/cuda_driver.h"

namespace fastddp {
namespace {

// A wire that stages pass on flies once.
void lay_out(std::vector<Travel>& travels, const Trip& trip) {
  const auto& shared = trip.shared;
  for (auto& travel : travels) {
    auto* const host = host_of(travels, shared, travel.bucket->index());
    for (size_t stage = 0; stage < trip.stages.size(); ++stage) {
      if (trip.stages[stage].write) travel.flights.push_back({.first = stage, .travels = {}, .pieces = {}, .started = {}});
      travel.flight_of.push_back(travel.flights.size() - 1);
      const bool is_carried = host != nullptr && stage >= shared->second && stage < shared->second + shared->of_a_leg;
      travel.carriers.push_back(is_carried ? Travel::Carrier{host, stage - (shared->second - shared->first)}
                                           : Travel::Carrier{&travel, stage});
    }
    for (auto& flight : travel.flights) flight.started.resize(trip.stages.size());
  }
}

// Two legs that share a wire enter their stages one after the other.
std::vector<size_t> order_of(const Trip& trip) {
  std::vector<size_t> order;
  for (size_t stage = 0; stage < trip.stages.size(); ++stage) {
    if (trip.shared && stage == trip.shared->second) continue;
    order.push_back(stage);
    if (trip.shared && stage == trip.shared->first) order.push_back(trip.shared->second);
  }
  return order;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------ between two windows

Driver::Next Driver::prepare(std::shared_ptr<Way> way, std::vector<Bucket>& buckets) const {
  const auto memory = memory_;
  std::optional<Slabs> slabs;  // the places for wires that do not exist yet
  if (memory != nullptr) slabs.emplace(*memory);
  Next next{std::move(way)};
  next.trip = make_trip(*next.way, buckets, next.travels, slabs ? &*slabs : nullptr);
  lay_out(next.travels, next.trip);
  next.order = order_of(next.trip);
  if (!slabs) return next;
  const Unlocked unlocked(lock_);
  slabs->allocate();
  return next;
}

void Driver::take(Next next) {
  way_ = std::move(next.way);
  travels_ = std::move(next.travels);
  trip_ = std::move(next.trip);
  order_ = std::move(next.order);
  for (auto& travel : travels_) travel.bucket->take(std::move(travel.outline));
  if (way_->hook != nullptr) way_->hook->use(buckets_.all(), lock_);
  way_->is_taken = true;
  set_weighting(weighting_);
  is_captured_ = false;
  begin_window();
}

void Driver::set_weighting(const Weighting& weighting) {
  weighting_ = weighting;
  if (trip_.runs_users_code) return;
  for (auto& travel : travels_) {
    travel.averages = travel.may_average && weighting.kind == Weighting::Kind::mean;
    travel.scale = travel.averages ? 1.0 : trip_.times.value_or(1.0) * scale();
    travel.codec_scale = trip_.times ? 1.0 / *trip_.times : travel.scale;
  }
}

void Driver::keep() {
  if (trip_.codec != nullptr) trip_.codec->keep();
}

void Driver::undo(const at::Tensor& only_if) {
  if (trip_.codec != nullptr) trip_.codec->undo(only_if);
}

void Driver::begin_window() {
  ticks_ = finished_ = 0;
  waits_.reset();
  failing_.reset();
  status_.reset();
  in_window_ = was_drained_ = false;
}

// ------------------------------------------------------------------------------------------------------------------------ a tick

void Driver::tick() {
  // In it this thread may wait, or run a user's hook.
  const Timeline::Wait waits(timeline_, trip_.runs_users_code ? What::hook : What::tick, ticks_);
  in_window_ = true;
  const bool begins = ticks_ < travels_.size();
  if (begins) timeline_.happened(What::starts, ticks_);
  enter_stages(ticks_, std::nullopt);
  if (begins) timeline_.happened(What::started, ticks_);
  if (ticks_ >= lag()) tell_when_arrived(travels_[ticks_ - lag()]);
  ++ticks_;
  finish_arrived();
}

void Driver::gradient(Bucket& bucket, size_t member) {
  auto& travel = travels_[bucket.index()];
  if (travel.encodes_on_arrival && !travel.wires.front().exists()) make_wire(travel, 0);
  trip_.gradient(*way_, travel, member);
}

Travel* Driver::entering(size_t tick, size_t stage) {
  return stage <= tick && tick - stage < travels_.size() ? &travels_[tick - stage] : nullptr;
}

void Driver::enter_stages(size_t tick, std::optional<double> void_value) {
  const auto& shared = trip_.shared;
  if (shared && shared->first == 0 && tick + 1 < travels_.size()) make_wire(travels_[tick + 1], 0);  // note [Wires of legs]
  for (const auto stage : order_) {
    auto* const travel = entering(tick, stage);
    if (travel != nullptr && stage == 0) enter(*travel, stage, void_value);
    if (travel != nullptr && stage > 0) {
      const auto on_side_streams = buckets_.side_streams().make_current();
      enter(*travel, stage, void_value);
    }
    if (shared && stage == shared->second) start_shared(tick);
  }
}

void Driver::enter(Travel& travel, size_t stage, std::optional<double> void_value) {
  const auto& now = trip_.stages[stage];
  if (void_value && (was_drained_ || !now.is_relayed)) {
    make_void(travel, stage, *void_value);
  } else if (now.write != nullptr) {
    if (stage > 0) arrive(travel, stage - 1);
    if (const auto* wire = travel.wire_of(now); wire != nullptr && !wire->exists()) make_wire(travel, *now.leg);
    const auto travels = now.write(*way_, travel);
    if (!travel.is_carried(stage)) {
      write_status(travel, stage, travels);
      if (!travel.at(stage).travels.is_same(travels)) cut(travel, stage, travels);  // pieces stay while their wire is the same
    }
  }
  const auto& shared = trip_.shared;
  if (!shared || (stage != shared->first && stage != shared->second)) start(travel, stage);
}

// Both legs are written.
void Driver::start_shared(size_t tick) {
  if (trip_.shared->first == 0) buckets_.side_streams().wait_for_current_streams();
  const auto on_side_streams = buckets_.side_streams().make_current();
  for (const auto stage : {trip_.shared->first, trip_.shared->second}) {
    if (auto* const travel = entering(tick, stage)) start(*travel, stage);
  }
}

// Makes the wire of a leg, before its first use in a window.
void Driver::make_wire(Travel& travel, size_t leg) {
  auto& wire = travel.wires[leg];
  if (wire.exists()) return;
  if (auto* const host = leg == 1 ? host_of(travels_, trip_.shared, travel.bucket->index()) : nullptr) {
    make_wire(*host, 0);
    return wire.become(host->wires[0].tensor().narrow(0, host->legs[0].elements, travel.legs[1].elements));
  }
  wire.make();
  wire.tensor().zero_();
  if (!wire.sum().is_same(wire.tensor())) wire.sum().zero_();
  travel.bucket->window.producers.note(travel.bucket->device());
}

void Driver::cut(Travel& travel, size_t stage, const at::Tensor& travels) {
  auto& flight = travel.at(stage);
  flight.travels = travels;
  const auto& by = trip_.stages[flight.first];
  const bool is_empty = !travels.defined() || (travels.numel() == 0 && !trip_.runs_users_code);
  const auto parts = is_empty ? Shards() : by.pieces(travels);
  TORCH_CHECK(parts.size() <= kMostPieces, "fastddp: bucket ", travel.bucket->index(), " is too long to travel in ",
              kMostPieces, " pieces");
  const auto* const of_leg = travel.wire_of(by);
  const auto& wire = of_leg != nullptr ? *of_leg : travel.bucket->wire;
  const bool has_beside = wire.exists() && travels.is_same(wire.tensor()) && !wire.sum().is_same(wire.tensor());
  const auto beside = has_beside && !is_empty ? by.pieces(wire.sum()) : Shards();
  while (flight.pieces.size() < parts.size()) {
    const auto bucket = travel.bucket->index();
    flight.pieces.emplace_back(tag_of(/*is_gathered=*/false, model_, bucket, flight.pieces.size()), bucket);
  }
  flight.pieces.erase(flight.pieces.begin() + static_cast<std::ptrdiff_t>(parts.size()), flight.pieces.end());
  for (size_t i = 0; i < parts.size(); ++i) {
    auto& piece = flight.pieces[i];
    piece.wire = parts[i];
    if (has_beside) (of_leg != nullptr && travel.legs[*by.leg].keeps_sent ? piece.sum : piece.room) = beside[i];
    travel.bucket->wire.lend(parts[i]);
  }
}

// Note [Collectives that were started], driver.h.
void Driver::start(Travel& travel, size_t stage) {
  auto& flight = travel.at(stage);
  if (flight.pieces.empty() || travel.is_carried(stage)) return;
  const auto& sends = *trip_.stages[stage].sends;
  // The range of what is no gradient names no bucket: the wire may carry another one's leg.
  std::optional<BucketRange> of_bucket;
  std::optional<Range> of_wire;
  if (travel.wire_of(trip_.stages[flight.first]) == nullptr || (!trip_.shared && travel.spans.all.front().packs)) {
    of_bucket.emplace("collective", *travel.bucket, stage);
  } else {
    of_wire.emplace("collective", [&] {
      return " tick=" + std::to_string(travel.bucket->index() + stage) + " bytes=" + std::to_string(flight.travels.nbytes());
    });
  }
  std::optional<WithoutPythonObjects> without;
  if (!trip_.runs_users_code) without.emplace();
  for (auto& count = flight.started[stage]; count < flight.pieces.size(); ++count) {
    auto& piece = flight.pieces[count];
    if (stage > flight.first) complete(stage - 1, piece);
    piece.averages = travel.averages;
    try {
      sends.start(sends.lanes.of(travel.bucket->index() + flight.first, count), piece);
    } catch (...) {
      piece.sent += piece.works.size();
      failing_ = piece.bucket;
      Interruption::rethrow_explained(trip_.runs_users_code);
    }
    piece.sent = 0;
    for (const auto& shard : piece.shards) travel.bucket->wire.lend(shard);
  }
}

// ------------------------------------------------------------------------------------------------------------------ what has come

// Waits until the stage's data has come, and adds it up.
void Driver::complete(size_t stage, Piece& piece) {
  {
    auto waits = c10::make_scope_exit([&] { failing_ = piece.bucket; });
    const Unlocked unlocked(lock_of_users());
    who_waits_.wait_for(piece.works, piece.wire);
    waits.release();
  }
  if (piece.added_up > stage) return;
  trip_.stages[stage].sends->add_up(piece);
  if (piece.room.defined()) note_use_of_wire(buckets_[piece.bucket], piece.room);
  piece.added_up = stage + 1;
}

void Driver::arrive(Travel& travel, size_t stage) {
  const BucketRange range("wait", *travel.bucket, stage);
  for (auto& piece : travel.pieces(stage)) complete(travel.carriers[stage].stage, piece);
}

// Whether the end of its trip would not block the calling thread. Reads what has come, where ranks read: note [Reads],
// transport/reads.h. Not only the sum has to be there: the end waits until other ranks have read.
bool Driver::has_arrived(Travel& travel) {
  if (who_waits_.is_the_stream(travel.bucket->device())) return true;
  auto& pieces = travel.pieces(lag());
  if (!std::ranges::all_of(pieces, [](const Piece& piece) { return are_done(piece.works); })) return false;
  return std::ranges::all_of(pieces, [&](Piece& piece) {
    if (!piece.acks.empty()) complete(travel.carriers[lag()].stage, piece);
    return are_done(piece.acks);
  });
}

// On a device with streams the call may come sooner, with a current stream that waits for the collective. It never comes if the
// process group has no futures.
void Driver::tell_when_arrived(Travel& travel) {
  const auto call = timeline_.when_arrived(travel.bucket->index());
  if (call == nullptr) return;
  Works works;
  for (const auto& piece : travel.pieces(lag())) works.insert(works.end(), piece.works.begin(), piece.works.end());
  when_done(works, call);
}

// Gradients left in place are written only when backward has ended: note [Gradients left in place], reducer/reduction.h.
void Driver::finish_arrived() {
  const auto fully_started = ticks_ - std::min(ticks_, lag());
  while (finished_ < fully_started) {
    auto& travel = travels_[finished_];
    if (travel.bucket->window.left_in_place || !has_arrived(travel)) return;
    finish_next();
  }
}

void Driver::finish_all() {
  while (finished_ < travels_.size()) {
    timeline_.happened(What::finish, finished_);
    finish_next();
  }
}

void Driver::finish_next() {
  const auto on_side_streams = buckets_.side_streams().make_current();
  auto& travel = travels_[finished_++];
  auto& bucket = *travel.bucket;
  arrive(travel, lag());
  trip_.end(*way_, travel);
  forget(travel);
  // On a device the memory of a lent wire has to wait for the caller's stream: note [Lent wires], bucket/wire.h.
  if (bucket.lends_wire() && !has_streams(bucket.device())) {
    for (auto& flight : travel.flights) flight.forget_wire();
    bucket.wire.give_back();
  }
  timeline_.happened(What::finished, bucket.index());
  note_use_of_wire(bucket, bucket.wire.tensor());
  on_finished_(bucket);
}

// What is left of the window in a bucket that has ended its trip.
void Driver::forget(Travel& travel) {
  for (auto& flight : travel.flights) {
    for (auto& piece : flight.pieces) {
      // Orders no gradients.
      wait_for(std::exchange(piece.acks, {}));
      piece.shards.clear();
      piece.works.clear();
      piece.sent = piece.added_up = 0;
    }
    flight.started.assign(flight.started.size(), 0);
    if (std::exchange(flight.is_void, false)) flight.forget_wire();
  }
  for (const auto& wire : travel.wires) {
    note_use_of_wire(*travel.bucket, wire.tensor());
    note_use_of_wire(*travel.bucket, wire.sum());
  }
  if (travel.bound.defined()) return;
  for (auto& span : travel.spans.all) span.gradient.reset();
}

void Driver::join() {
  buckets_.side_streams().current_streams_wait();
  for (auto& bucket : buckets_.all()) {
    bucket.window.kept.release_after_join();
    keep_for_current_stream(bucket.wire.tensor());
  }
}

void Driver::give_back() {
  const auto captures = [](const Bucket& bucket) { return is_capturing(bucket.device()); };
  is_captured_ = is_captured_ || std::ranges::any_of(buckets_.all(), captures);
  if (is_captured_ || !buckets_.form().lazy_bucket_allocation) return;
  for (auto& travel : travels_) {
    for (auto& flight : travel.flights) flight.pieces.clear(), flight.travels.reset();
    for (auto& wire : travel.wires) wire.give_back();
    if (travel.bucket->lends_wire()) travel.bucket->wire.give_back();
    if (!travel.bucket->window.seen.unread.empty()) travel.bucket->window.seen = {};
  }
  for (const auto& stage : trip_.stages) {
    if (stage.sends != nullptr) stage.sends->give_room_back();
  }
}

void Driver::discard(Bucket& bucket, size_t member) {
  const auto& travel = travels_[bucket.index()];
  if (travel.legs.empty()) return;
  std::vector<size_t> which;
  for (const auto& span : travel.spans.all) {
    if (span.parameter == bucket.layout.parameter(member)) which.push_back(span.number);
  }
  trip_.codec->discard(travel.spans, which);
}

// ------------------------------------------------------------------------------------------------------ note [Room for the status]

// Undefined: there is none in this wire.
at::Tensor Driver::room_for_status(const Travel& travel, size_t stage, const at::Tensor& wire) const {
  if (!trip_.has_status || &travel != &travels_.back() || stage != lag()) return {};
  return travel.legs.empty() ? travel.bucket->layout.tail(wire) : wire.narrow(0, travel.legs.back().elements, kStatusRoom);
}

void Driver::write_status(const Travel& travel, size_t stage, const at::Tensor& wire) {
  const auto room = room_for_status(travel, stage, wire);
  if (!room.defined()) return;
  status_ = room;
  if (write_status_) write_status_(room);
}

// What follows the gradients of a wire is zero again: note [Aligned members], bucket/layout.h.
Driver::Status Driver::take_status() {
  const auto sums = status_.clone();
  status_.zero_();
  status_.reset();
  return {sums, travels_.back().averages ? 1.0 / scale() : 1.0};
}

// ------------------------------------------------------------------------------------------------------ note [A window that fails]

// Does not touch a bucket's own wire, where gradients live: from this stage on, another one travels in its place. A codec's wire goes
// through all its stages, because the ranks' sum has to come out of it. Only pieces that have not started become void.
void Driver::make_void(Travel& travel, size_t stage, double value) {
  auto& flight = travel.at(stage);
  const auto& by = trip_.stages[flight.first];
  if (travel.wire_of(by) != nullptr) make_wire(travel, *by.leg);
  if (travel.is_carried(stage) || std::exchange(flight.is_void, true)) return;
  if (travel.wire_of(by) != nullptr) return overwrite(travel, stage, value);
  const auto instead = by.instead ? by.instead(*way_, travel, value) : at::Tensor();
  write_status(travel, stage, instead);
  cut(travel, stage, instead);
  for (auto& piece : flight.pieces) piece.added_up = stage;
}

void Driver::overwrite(Travel& travel, size_t stage, double value) {
  auto& flight = travel.at(stage);
  const auto& by = trip_.stages[flight.first];
  const auto leg = *by.leg;
  const auto& wire = travel.wires[leg].tensor();
  cut(travel, stage, wire);
  if (stage > flight.first) return;
  const auto instead = travel.wires[leg].another().zero_();
  trip_.codec->fill_void(leg, travel.bucket->index(), instead.narrow(0, 0, travel.legs[leg].elements), value);
  if (auto* const guest = leg == 0 ? guest_of(travels_, trip_.shared, travel.bucket->index()) : nullptr) {
    const auto place = instead.narrow(0, travel.legs[0].elements, guest->legs[1].elements);
    trip_.codec->fill_void(1, guest->bucket->index(), place, value);
  }
  write_status(travel, stage, instead);
  status_ = room_for_status(travel, stage, wire);  // where the ranks' sum comes
  const auto parts = by.pieces(instead);
  for (auto i = flight.started[stage]; i < flight.pieces.size(); ++i) flight.pieces[i].wire.copy_(parts[i]);
}

void Driver::abandon_rest(double value) {
  in_window_ = true;
  is_of_others_ = value == 0.0;
  // Of a window that failed.
  buckets_.side_streams().wait_for_current_streams();
  {
    // Of a window that failed.
    const auto on_side_streams = buckets_.side_streams().make_current();
    for (; ticks_ < ticks(); ++ticks_) enter_stages(ticks_, value);
    while (finished_ < travels_.size()) recover(travels_[finished_++]);
  }
  // Of a window that failed.
  buckets_.side_streams().current_streams_wait();
}

void Driver::recover(Travel& travel) {
  for (auto& flight : travel.flights) {
    for (auto& piece : flight.pieces) {
      const Unlocked unlocked(lock_of_users());
      // Of a window that failed.
      who_waits_.wait_for(piece.works, piece.wire);
    }
  }
  if (trip_.ends_for_others && is_of_others_) {
    arrive(travel, lag());
    trip_.end(*way_, travel);
  } else {
    trip_.recover(*way_, travel);
  }
  forget(travel);
}

void Driver::drain() {
  for (auto& travel : travels_) {
    for (auto& flight : travel.flights) {
      for (auto& piece : flight.pieces) {
        const Unlocked unlocked(lock_of_users());
        fastddp::drain(piece.works);
      }
      flight.forget_wire();
    }
    for (const auto& span : travel.spans.all) {
      // Of a window that failed.
      keep_for_current_stream(span.gradient);
    }
  }
  for (const auto& stage : trip_.stages) {
    if (stage.sends != nullptr) stage.sends->give_room_back();
  }
  if (status_.defined()) status_ = status_.clone();  // the wire may be written to
  undo({});
  was_drained_ = in_window_;
}

// Nothing in flight may write to wires once the next window uses them. Gradients are zeroed too: something in flight may have
// written to them after the caller had set them to zero.
void Driver::void_what_was_done() {
  {
    const auto on_side_streams = buckets_.side_streams().make_current();
    drain();
  }
  // Of a window that failed.
  buckets_.side_streams().synchronize();
  for (auto& bucket : buckets_.all()) {
    zero_wire(bucket);
    leave_shared_memory(bucket);
  }
  for (size_t index = 0; index < finished_; ++index) {
    auto& bucket = buckets_[index];
    if (!has_streams(bucket.device())) continue;  // the host had written them before the exception
    for (size_t member = 0; member < bucket.size(); ++member) {
      const auto& gradient = bucket.held(member);
      if (gradient.defined() && !bucket.window[member].in_wire) about_to_write(gradient).zero_();
    }
  }
}

// Collectives in flight on a device go on using the wires, whose memory is about to be freed. (On the CPU, works hold what they
// use.)
void Driver::leave_behind() {
  if (!has_streams(buckets_.device())) return undo({});
  drain();
  for (const auto& bucket : buckets_.all()) keep_for_current_stream(bucket.wire.tensor());
}

}  // namespace fastddp
