#include "pipeline/pipeline.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "bucket/bucket_range.h"
#include "device/cuda_driver.h"
#include "observe/ranges.h"

namespace fastddp {
namespace {

std::vector<at::Tensor> split(const Message& message, const std::vector<at::Tensor>& wires) {
  std::vector<at::Tensor> parts;
  for (const auto& wire : wires) {
    if (wire.numel() > 0) std::ranges::copy(message.transport->split(wire), std::back_inserter(parts));
  }
  return parts;
}

}  // namespace

Pipeline::Pipeline(std::shared_ptr<Codec> codec, std::shared_ptr<Transport> transport)
    : Pipeline(codec, Transports(codec->legs(), transport), transport->lanes().all().front()) {}

Pipeline::Pipeline(std::shared_ptr<Codec> codec, Transports transports, c10::intrusive_ptr<c10d::ProcessGroup> group)
    : codec_(std::move(codec)), transports_(std::move(transports)), group_(std::move(group)) {
  size_t delay = 0;
  for (size_t leg = 0; leg < transports_.size(); ++leg) {
    const bool goes_on = leg > 0 && transports_[leg] == transports_[leg - 1];
    if (!goes_on) {
      transports_[leg]->set_adder(codec_->adder(leg));
      stretches_.push_back({leg, leg, {}});
    }
    ++stretches_.back().end;
    delays_.push_back(delay);
    delay += transports_[leg]->rounds();
  }
}

std::unique_ptr<Pipeline> Pipeline::two_levels(const Pipeline& outer, const std::shared_ptr<Sharding>& shards,
                                               const c10::intrusive_ptr<c10d::ProcessGroup>& all, const Lanes& node,
                                               bool remembers, bool spreads) {
  const auto ranks = static_cast<int64_t>(all->getSize()), ranks_of_node = node.ranks();
  TORCH_CHECK_VALUE(static_cast<size_t>(ranks_of_node) == shards->ranks(), "fastddp: shards for ", shards->ranks(),
                    " ranks of a node of ", ranks_of_node);
  const auto cut = runs_of(shards);
  const auto times = remembers ? static_cast<double>(ranks) / ranks_of_node : 1.0;
  outer.transports_.front()->set_weighting({remembers ? Weighting::Kind::mean : Weighting::Kind::sum});
  Transports transports{
      make_shard_sum(node, shards->device(), cut, {.own_sums = false, .ranks = ranks, .times = times, .is_last = !spreads})};
  std::ranges::copy(outer.transports_, std::back_inserter(transports));
  if (spreads) transports.push_back(make_shard_spread(node, shards->device(), cut));
  auto codec = make_node_codec(outer.codec_, shards, remembers, spreads);
  return std::unique_ptr<Pipeline>(new Pipeline(std::move(codec), std::move(transports), all));
}

std::unique_ptr<Pipeline> Pipeline::sharded(const Pipeline& whole, const std::shared_ptr<Sharding>& sharding) {
  std::shared_ptr<Transport> transport = whole.transports_.front()->only_sum(sharding->device(), runs_of(sharding));
  TORCH_CHECK_VALUE(transport != nullptr && whole.codec_->legs() == 1,
                    "fastddp: a sharded optimizer takes gradients that travel in one leg, by a sum that has halves");
  auto codec = make_shard_codec(whole.codec_, sharding);
  return std::unique_ptr<Pipeline>(new Pipeline(std::move(codec), {std::move(transport)}, whole.group_));
}

// Null if any leg is something else than collectives.
c10d::ProcessGroup* Pipeline::lane(size_t number) const {
  const bool sends_collectives = std::ranges::all_of(transports_, &Transport::sends_collectives);
  return sends_collectives ? transports_.front()->lanes().at(number) : nullptr;
}

bool Pipeline::arrived(const Bucket& bucket) {
  if (who_waits_.is_the_stream(bucket.device())) return true;
  auto& message = last_message(bucket);
  if (!are_done(message.works())) return false;
  // Not only the sum has to be there: finish() waits until other ranks have read.
  return std::ranges::all_of(message.pieces, [&](auto& piece) {
    if (!piece.acks.empty()) complete(message, message.transport->rounds() - 1, piece);
    return are_done(piece.acks);
  });
}

void Pipeline::finish(Bucket& bucket) {
  wait_for_sum(codec_->legs() - 1, bucket);
  codec_->decode(bucket);
  forget_window(bucket);
  // On a device the memory of a lent wire has to wait for the caller's stream: note [Lent wires], bucket/wire.h.
  if (bucket.lends_wire() && !has_streams(bucket.device())) bucket.wire.drop();
}

void Pipeline::let_wires_go() {
  const auto captures = [](const Bucket* bucket) { return is_capturing(bucket->device()); };
  is_captured_ = is_captured_ || std::ranges::any_of(buckets_, captures);
  if (is_captured_ || buckets_.empty() || !buckets_.front()->layout.form().lazy_bucket_allocation) return;
  for (auto* bucket : buckets_) {
    if (bucket->lends_wire()) bucket->wire.drop();
    codec_->displace(*bucket);
  }
  for_messages([](Message& message) { message.let_wires_go(); });
  for (const auto& transport : transports_) transport->give_room_back();
}

std::function<void()> Pipeline::start_late(Bucket& bucket) {
  bucket.wire.tensor().mul_(scale());
  return [work = Lanes({group_}).start_sum(bucket.wire.tensor())] { Interruption::wait(*work); };
}

// ------------------------------------------------------------------------------------------------------ note [Messages]

const Message& Pipeline::message_of(const Bucket& bucket, size_t leg) const {
  const auto has_leg = [&](const Stretch& stretch) { return leg < stretch.end; };
  return std::ranges::find_if(stretches_, has_leg)->messages[bucket.index() + delays_[leg]];
}

Message& Pipeline::message_of(const Bucket& bucket, size_t leg) {
  return const_cast<Message&>(std::as_const(*this).message_of(bucket, leg));
}

template <typename Function>
void Pipeline::for_messages(const Function& function) {
  for (auto& stretch : stretches_) std::ranges::for_each(stretch.messages, function);
}

// Calls function(message, round) for earlier ticks' messages that go through a round in this tick.
template <typename Function>
void Pipeline::for_later_rounds(Stretch& stretch, size_t tick, const Function& function) {
  auto& messages = stretch.messages;
  for (size_t round = 1; round < transports_[stretch.first]->rounds(); ++round) {
    if (tick >= round && tick - round < messages.size()) function(messages[tick - round], round);
  }
}

// ------------------------------------------------------------------------------ note [Room for the status], exchange.h

void Pipeline::write_status(Message& message, const std::vector<at::Tensor>& wires) {
  if (&message != with_status_) return;
  auto& bucket = message.last_bucket();
  status_ = status_place_ ? status_place_->in(wires) : bucket.layout.tail(wires.front());
  bucket.wire.lend(status_);
  if (write_status_) write_status_(status_);
}

// What follows the gradients of a wire is zero again: note [Aligned members], bucket/layout.h.
Exchange::Status Pipeline::take_status() {
  const auto sums = status_.clone();
  status_.zero_();
  status_.reset();
  const auto& transport = *transports_.back();
  return {sums, transport.scale_before(sums.scalar_type()) / transport.scale()};
}

// --------------------------------------------------------------------------------------------------------------- a tick

void Pipeline::tick(Stretch& stretch, size_t tick) {
  begin(stretch, tick);
  if (transports_[stretch.first]->rounds() == 1) return;
  // So that backward goes on.
  const auto on_side_streams = side_streams_->make_current();
  for_later_rounds(stretch, tick, [&](Message& message, size_t round) { start_rest(message, round); });
}

// Sends a wire as soon as it is encoded. Waits, and reads of other ranks' data, come after that. If a later leg may travel in the
// same message, a side stream sends the message after it has encoded that leg.
void Pipeline::begin(Stretch& stretch, size_t tick) {
  if (tick >= stretch.messages.size()) return;
  auto& message = stretch.messages[tick];
  const bool has_first_legs = stretch.first == 0, has_later_legs = stretch.end > 1;
  if (has_first_legs) {
    need_wires(message);
    if (has_later_legs) need_wires(stretch, tick + 1);  // note [Wires of messages]
    for (const auto& [leg, bucket] : message.legs) {
      if (leg == 0) codec_->encode(leg, *bucket, scale_before(leg, *bucket));
    }
    if (!has_later_legs) return send(message);
  }
  encode_later_legs(message);
  if (has_first_legs) side_streams_->wait_for_current_streams();
  const auto on_side_streams = side_streams_->make_current();
  send(message);
}

void Pipeline::encode_later_legs(Message& message) {
  const auto on_side_streams = side_streams_->make_current();
  need_wires(message);
  for (const auto& [leg, bucket] : message.legs) {
    if (leg == 0) continue;
    wait_for_sum(leg - 1, *bucket);
    codec_->encode(leg, *bucket, scale_before(leg, *bucket));
  }
}

void Pipeline::send(Message& message) {
  if (message.legs.empty()) return;
  if (message.is_own_wire) {
    const auto& [leg, bucket] = message.legs.front();
    message.own_wire = codec_->wire(leg, *bucket);
  }
  const auto wires = message.is_own_wire ? std::vector{message.own_wire} : message.wires;
  write_status(message, wires);
  set_pieces(message, wires);
  start_rest(message, 0);
}

void Pipeline::set_pieces(Message& message, const std::vector<at::Tensor>& wires) const {
  auto& pieces = message.pieces;
  auto& bucket = message.last_bucket();
  const auto parts = split(message, wires), sums = split(message, message.sums);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i == pieces.size()) pieces.emplace_back(tag(message, i), bucket.index());
    pieces[i].wire = parts[i];
    pieces[i].shards.clear();
    if (!sums.empty()) (codec_->keeps_what_it_sent() ? pieces[i].sum : pieces[i].room) = sums[i];
    bucket.wire.lend(parts[i]);
  }
}

uint32_t Pipeline::tag(const Message& message, size_t piece) const {
  TORCH_CHECK(piece < kMostPieces, "fastddp: bucket ", message.last_bucket().index(), " is too long to travel in ", kMostPieces,
              " pieces");
  return static_cast<uint32_t>(message.tick * kMostPieces + piece);
}

// Note [Collectives that were started]
void Pipeline::start_rest(Message& message, size_t round) {
  if (message.pieces.empty()) return;  // a leg takes more ticks than there are buckets
  if (message.is_own_wire) {
    const auto& [leg, bucket] = message.legs.front();
    const BucketRange range("collective", codec_->carrier(leg, *bucket), delays_[leg] + round);
    start_rest_of_pieces(message, round);
  } else {
    const Range range("collective", message.tick + round, message.wires);
    start_rest_of_pieces(message, round);
  }
}

void Pipeline::start_rest_of_pieces(Message& message, size_t round) {
  for (auto& count = message.started[round]; count < message.pieces.size(); ++count) {
    auto& piece = message.pieces[count];
    if (round > 0) complete(message, round - 1, piece);
    start(message, round, message.transport->lanes().of(message.tick, count), piece);
    for (const auto& shard : piece.shards) message.last_bucket().wire.lend(shard);
  }
}

void Pipeline::start(const Message& message, size_t round, c10d::ProcessGroup& lane, Piece& piece) const {
  const WithoutPythonObjects without;
  try {
    message.transport->start(round, lane, piece);
  } catch (...) {
    piece.sent += piece.works.size();
    throw;
  }
  piece.sent = 0;
}

// Waits until the round's data has come, and adds it up. All waits for the legs of one message are on the same stream.
void Pipeline::complete(const Message& message, size_t round, Piece& piece) {
  who_waits_.wait_for(piece.works, piece.wire);
  if (piece.added_up > round) return;
  message.transport->add_up(round, piece);
  if (piece.room.defined()) message.last_bucket().note_use_of_wire(piece.room);
  piece.added_up = round + 1;
}

void Pipeline::wait_for_sum(size_t leg, Bucket& bucket) {
  auto& message = message_of(bucket, leg);
  const auto last_round = message.transport->rounds() - 1;
  const BucketRange range("wait", codec_->carrier(leg, bucket), delays_[leg] + last_round);
  for (auto& piece : message.pieces) complete(message, last_round, piece);
  if (message.is_own_wire) codec_->note_came(leg, bucket, message.own_wire);
}

// Forgets the messages that are used last for this bucket.
void Pipeline::forget_window(const Bucket& bucket) {
  for (size_t leg = 0; leg < codec_->legs(); ++leg) {
    auto& message = message_of(bucket, leg);
    auto& last = message.last_bucket();
    if (&last != &bucket) continue;
    // Orders no gradients.
    for (auto& piece : message.pieces) wait_for(std::exchange(piece.acks, {}));
    for (const auto& wire : message.wires) last.note_use_of_wire(wire);
    for (const auto& sum : message.sums) last.note_use_of_wire(sum);
    message.forget_window();
  }
  if (&bucket == buckets_.back()) in_window_ = was_drained_ = false;
}

// ------------------------------------------------------------------------- note [A window that fails], exchange.h

void Pipeline::abandon(size_t tick, double value) {
  check_fits();
  in_window_ = true;
  is_of_others_ = value == 0.0;
  for (auto& stretch : stretches_) {
    if (stretch.first > 0 && codec_->relays() && !was_drained_) {
      // Of a window that failed.
      side_streams_->wait_for_current_streams();
      this->tick(stretch, tick);
      // Of a window that failed.
      side_streams_->current_streams_wait();
      continue;
    }
    if (tick < stretch.messages.size()) abandon(stretch.messages[tick], 0, value);
    for_later_rounds(stretch, tick, [&](Message& message, size_t round) { abandon(message, round, value); });
  }
}

void Pipeline::abandon(Message& message, size_t round, double value) {
  if (message.legs.empty()) return;
  need_wires(message);
  if (!message.is_void) make_void(message, round, value);
  message.is_void = true;
  start_rest(message, round);
  for (auto& piece : message.pieces) {
    // Of a window that failed.
    who_waits_.wait_for(piece.works, piece.wire);
  }
}

// Does not touch a bucket's wire, where gradients live: from this round on, another one travels in its place. A codec's wires go
// through all their rounds, because the ranks' sum has to come out of them. Only pieces not started yet become void.
void Pipeline::make_void(Message& message, size_t round, double value) {
  const auto instead = void_wires(message, value);
  write_status(message, instead);
  if (message.is_own_wire) {
    message.own_wire = instead.front();
    set_pieces(message, instead);
    for (auto& piece : message.pieces) piece.added_up = round;
    return;
  }
  set_pieces(message, message.wires);
  if (round > 0) return;
  const auto parts = split(message, instead);
  for (auto i = message.started[0]; i < message.pieces.size(); ++i) message.pieces[i].wire.copy_(parts[i]);
}

std::vector<at::Tensor> Pipeline::void_wires(Message& message, double value) {
  if (message.is_own_wire) {
    const auto& [leg, bucket] = message.legs.front();
    auto& carrier = codec_->carrier(leg, *bucket);
    if (is_symmetric_ && !carrier.wire.exists()) carrier.wire.make(carrier.layout);
    const auto wire = is_symmetric_ ? carrier.wire.tensor() : carrier.layout.empty_wire();
    codec_->fill_void(leg, *bucket, wire, value);
    return {wire};
  }
  std::vector<at::Tensor> wires;
  for (const auto& wire : message.wires) wires.push_back(at::zeros_like(wire));
  for (const auto& place : message.places) {
    codec_->fill_void(place.leg.number, *place.leg.bucket, place.in(wires), value);
  }
  return wires;
}

void Pipeline::recover(Bucket& bucket) {
  for (size_t leg = 0; leg < codec_->legs(); ++leg) {
    for (auto& piece : message_of(bucket, leg).pieces) {
      // Of a window that failed.
      who_waits_.wait_for(piece.works, piece.wire);
    }
  }
  if (codec_->is_sharded() && is_of_others_) return finish(bucket);
  codec_->recover(bucket);
  forget_window(bucket);
}

void Pipeline::drain() {
  for_messages([](Message& message) {
    for (auto& piece : message.pieces) {
      fastddp::drain(piece.works);
      piece.wire.reset();
    }
  });
  if (status_.defined()) status_ = status_.clone();  // the wire may be written to
  codec_->undo({});
  was_drained_ = in_window_;
}

}  // namespace fastddp
