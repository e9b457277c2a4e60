#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "bucket/bucket_range.h"
#include "device/cuda_driver.h"
#include "observe/ranges.h"
#include "pipeline/exchange.h"
#include "pipeline/message.h"
#include "transport/works.h"

namespace fastddp {
namespace {

// Note [Messages]
// A message carries the first leg of a bucket, and later legs of earlier buckets. A leg travels after the previous leg has gone
// through all rounds. So leg l of bucket b is in message b + l * rounds. Message m goes through round r in tick m + r. Legs of
// one message and one dtype share a wire, and so a collective: in each window PowerSGD takes one collective for each bucket, and
// one more. If the pipeline carries only some of the buckets, the messages of the others have no first leg.
//
// Note [Wires of messages]
// Wires are made when a window first needs them. Lent wires (note [Lent wires], bucket/wire.h) are made in every window, and so
// are their sums. A slab (note [Slabs], transport/registered_memory.h) has a place for the transport's room, too.
// Either all ranks send from symmetric memory, or none. So if a window fails, what travels instead is written to the wire
// itself there, and gradients do not live in that wire.
// A wire is zeroed on the stream that is current when it is made. The codec always writes after that. It writes a first leg
// after the bucket has waited for its producers. It writes a later leg on a side stream, one tick after the wire was made, and
// the side stream has waited for the streams of that tick.
//
// Note [Collectives that were started]
// If the second piece of a wire cannot be sent, the first one is still on its way. drain() has to wait for it, and abandon()
// must not send it again: other ranks would take it for the next window's. So a piece is counted as soon as it has started, by
// message and round, until the window is over.
class Pipeline : public Exchange {
 public:
  Pipeline(std::shared_ptr<Codec> codec, std::shared_ptr<Transport> transport)
      : codec_(std::move(codec)), transport_(std::move(transport)) {
    transport_->set_adder(codec_->adder());
  }

  void set_average(const Average& average) override { transport_->set_average(average); }

  c10d::ProcessGroup* group() const override { return transport_->lanes().first(); }

  c10d::ProcessGroup* lane(size_t number) const override {
    return transport_->sends_collectives() ? transport_->lanes().at(number) : nullptr;
  }

  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const override { return transport_->lanes().all(); }

  double scale() const override { return transport_->scale(); }

  size_t lag() const override { return codec_->legs() * rounds() - 1; }

  void carry(Share share) override { share_ = std::move(share); }

  void prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) override {
    buckets_ = &buckets;
    side_streams_ = &side_streams;
    carried_.clear();
    for (auto& bucket : buckets) {
      if (carries(bucket.index())) carried_.push_back(&bucket);
    }
    codec_->prepare(carried_, transport_->unit());
    for (auto* bucket : carried_) bucket->wire.take_back();  // aliases for another transport
    messages_.assign(buckets.size() + (codec_->legs() - 1) * rounds(), {});
    for (size_t number = 0; number < messages_.size(); ++number) {
      messages_[number].started.assign(rounds(), 0);
      lay_out(number);
      if (!buckets.empty()) reserve(number, slabs);
    }
    is_captured_ = false;
  }

  void on_gradient(Bucket& bucket, size_t member) override {
    need_wires(bucket.index());
    codec_->on_gradient(bucket, member, scale_before(bucket));
  }

  // Sends a wire as soon as it is encoded. Waits, and reads of other ranks' data, come after that. If a later leg may travel in
  // the same message, a side stream sends the message after it has encoded that leg.
  void tick(size_t tick) override {
    need_wires(tick);
    if (codec_->legs() > 1) need_wires(tick + 1);  // note [Wires of messages]
    if (carries(tick)) encode(0, (*buckets_)[tick]);
    if (codec_->legs() == 1) {
      begin(tick);
    } else {
      encode_later_legs(tick);
      side_streams_->wait_for_current_streams();
      const auto on_side_streams = side_streams_->make_current();
      begin(tick);
    }
    if (rounds() == 1) return;
    // So that backward goes on.
    const auto on_side_streams = side_streams_->make_current();
    for_later_rounds(tick, [&](size_t number, size_t round) { start_rest(number, round); });
  }

  bool arrived(const Bucket& bucket) const override {
    return who_waits_.is_the_stream(bucket.device()) || are_done(works_of(last_message(bucket)));
  }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    when_done(works_of(last_message(bucket)), call);
  }

  void finish(Bucket& bucket) override {
    wait(bucket, codec_->legs() - 1);
    for (const auto& piece : last_message(bucket).pieces) transport_->note_came(piece);
    codec_->decode(bucket);
    forget_window(bucket);
  }

  void let_wires_go() override {
    const auto captures = [](const Bucket& bucket) { return is_capturing(bucket.device()); };
    is_captured_ = is_captured_ || std::ranges::any_of(*buckets_, captures);
    if (is_captured_ || buckets_->empty() || !buckets_->front().layout.form().lends_wires) return;
    for (auto* bucket : carried_) {
      if (bucket->lends_wire()) bucket->wire.drop();
      codec_->displace(*bucket);
    }
    for (auto& message : messages_) message.let_wires_go();
  }

  void discard(Bucket& bucket, size_t member) override { codec_->discard(bucket, member); }

  void keep() override { codec_->keep(); }

  void undo(const at::Tensor& only_if) override { codec_->undo(only_if); }

  const std::vector<at::Tensor>& measure(Bucket& bucket) override { return codec_->measure(bucket); }

  std::function<void()> start_late(Bucket& bucket) override {
    bucket.wire.tensor().mul_(scale());
    return [work = transport_->lanes().start_sum(bucket.wire.tensor())] { Interruption::wait(*work); };
  }

  void abandon(size_t tick, double value) override {
    if (tick < messages_.size()) abandon(tick, 0, value);
    for_later_rounds(tick, [&](size_t number, size_t round) { abandon(number, round, value); });
  }

  void recover(Bucket& bucket) override {
    codec_->recover(bucket);
    forget_window(bucket);
  }

  void drain() override {
    for (auto& message : messages_) {
      for (auto& piece : message.pieces) {
        fastddp::drain(piece.works);
        piece.wire.reset();
      }
    }
    codec_->undo({});
  }

 private:
  size_t rounds() const { return transport_->rounds(); }

  bool carries(size_t bucket) const { return bucket < buckets_->size() && (!share_ || share_->carries.at(bucket)); }

  // ------------------------------------------------------------------------------------ note [Wires of messages]

  // The bucket whose first leg is in the message, or the last bucket.
  Bucket& bucket_of(size_t number) const { return (*buckets_)[std::min(number, buckets_->size() - 1)]; }

  // Reserves places in the slab of the lane that carries the message's first piece.
  void reserve(size_t number, Slabs* slabs) {
    auto& message = messages_[number];
    auto& bucket = bucket_of(number);
    auto& lane = transport_->lanes().of(number, 0);
    if (message.is_bucket_wire) {
      is_symmetric_ = slabs != nullptr && slabs->are_symmetric() && lane.getSize() > 1;
      if (is_symmetric_) bucket.wire.set_home(false);
      reserve_wire(bucket, lane, slabs, /*may_be_symmetric=*/true);
    }
    if (slabs == nullptr || bucket.layout.form().lends_wires) return;
    int64_t bytes = 0;
    for (const auto& format : beside(number, /*gives_room=*/true)) bytes += bytes_of(format);
    for (const auto& format : message.formats) bytes += bytes_of(format);
    message.memory = slabs->reserve(lane, bucket.device(), bytes);
  }

  int64_t bytes_of(const Message::Format& format) const {
    return Slabs::bytes(padded(format.second), format.first.dtype().toScalarType());
  }

  int64_t padded(int64_t elements) const {
    const auto unit = transport_->unit();
    return (elements + unit - 1) / unit * unit;
  }

  // The formats of `Message::sums`.
  std::vector<Message::Format> beside(size_t number, bool gives_room) const {
    const auto& message = messages_[number];
    const auto& bucket = bucket_of(number);
    if (codec_->keeps_what_it_sent()) return message.formats;
    if (!gives_room || !transport_->takes_room()) return {};
    if (!message.is_bucket_wire) return message.formats;
    return {{bucket.layout.wire_options(), bucket.layout.wire_length()}};
  }

  // Makes the message's wires, before their first use in a window.
  void need_wires(size_t number) {
    if (number >= messages_.size()) return;
    auto& message = messages_[number];
    if (std::exchange(message.has_wires, true)) return;
    const auto zeros = [&](const Message::Format& format) {
      const auto& options = format.first;
      const auto elements = padded(format.second);
      return (message.memory ? message.memory(elements, options) : at::empty({elements}, options)).zero_();
    };
    for (const auto& format : message.formats) message.wires.push_back(zeros(format));
    for (const auto& format : beside(number, message.memory != nullptr)) message.sums.push_back(zeros(format));
    const auto& sums = codec_->keeps_what_it_sent() ? message.sums : message.wires;
    for (const auto& place : message.places) {
      auto& bucket = (*buckets_)[place.bucket];
      codec_->place(place.leg, bucket, place.in(message.wires), place.in(sums));
      bucket.window.producers.note(bucket.device());
    }
  }

  // ------------------------------------------------------------------------------------------ note [Messages]

  size_t message_of(const Bucket& bucket, size_t leg) const { return bucket.index() + leg * rounds(); }

  const Message& last_message(const Bucket& bucket) const { return messages_[message_of(bucket, codec_->legs() - 1)]; }

  // Calls function(leg, bucket) for the legs from `first` on that travel in the message.
  template <typename Function>
  void for_legs(size_t number, size_t first, const Function& function) const {
    for (size_t leg = first; leg < codec_->legs(); ++leg) {
      const auto behind = leg * rounds();
      if (number >= behind && carries(number - behind)) function(leg, (*buckets_)[number - behind]);
    }
  }

  // Calls function(message, round) for earlier ticks' messages that go through a round in this tick.
  template <typename Function>
  void for_later_rounds(size_t tick, const Function& function) const {
    for (size_t round = 1; round < rounds(); ++round) {
      if (tick >= round && tick - round < messages_.size()) function(tick - round, round);
    }
  }

  void lay_out(size_t number) {
    auto& message = messages_[number];
    auto& wires = message.formats;
    for_legs(number, 0, [&](size_t leg, const Bucket& bucket) {
      const auto format = codec_->format(leg, bucket);
      if (!format) {
        message.is_bucket_wire = true;
        return;
      }
      const auto options = at::TensorOptions().dtype(format->dtype).device(bucket.device());
      const auto same = [&](const auto& wire) {
        return wire.first.dtype() == options.dtype() && wire.first.device() == options.device();
      };
      const auto found = std::ranges::find_if(wires, same);
      const auto wire = static_cast<size_t>(found - wires.begin());
      if (found == wires.end()) wires.push_back({options, 0});
      message.places.push_back({leg, bucket.index(), wire, wires[wire].second, format->elements});
      wires[wire].second += format->elements;
    });
  }

  // --------------------------------------------------------------------------------------------------------- a tick

  double scale_before(const Bucket& bucket, size_t leg = 0) const {
    const auto format = codec_->format(leg, bucket);
    return transport_->scale_before(format ? format->dtype : bucket.layout.format().dtype);
  }

  void encode(size_t leg, Bucket& bucket) { codec_->encode(leg, bucket, scale_before(bucket, leg)); }

  void encode_later_legs(size_t tick) {
    const auto on_side_streams = side_streams_->make_current();
    for_legs(tick, 1, [&](size_t leg, Bucket& bucket) {
      wait(bucket, leg - 1);
      encode(leg, bucket);
    });
  }

  void begin(size_t number) {
    if (number >= messages_.size()) return;
    const auto& message = messages_[number];
    set_pieces(number, message.is_bucket_wire ? parts_of((*buckets_)[number]) : split(message.wires));
    start_rest(number, 0);
  }

  const std::vector<at::Tensor>& parts_of(Bucket& bucket) const {
    return bucket.wire.parts([this](const at::Tensor& wire) { return split({wire}); });
  }

  std::vector<at::Tensor> split(const std::vector<at::Tensor>& wires) const {
    std::vector<at::Tensor> parts;
    for (const auto& wire : wires) {
      if (wire.numel() > 0) std::ranges::copy(transport_->split(wire), std::back_inserter(parts));
    }
    return parts;
  }

  void set_pieces(size_t number, const std::vector<at::Tensor>& parts) {
    auto& pieces = messages_[number].pieces;
    const auto sums = split(messages_[number].sums);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i == pieces.size()) pieces.push_back({.tag = tag(number, i), .message = number});
      pieces[i].wire = parts[i];
      if (!sums.empty()) pieces[i].room = sums[i];
    }
  }

  // Exchanges that share the buckets may send later legs in the same tick, so each has its own tags.
  uint32_t tag(size_t message, size_t piece) const {
    TORCH_CHECK(piece < kMostPieces, "fastddp: bucket ", message, " is too long to travel in ", kMostPieces, " pieces");
    const auto number = share_ ? message * share_->exchanges + share_->number : message;
    return static_cast<uint32_t>(number * kMostPieces + piece);
  }

  // Note [Collectives that were started]
  void start_rest(size_t number, size_t round) {
    const auto& message = messages_[number];
    if (message.pieces.empty()) return;  // a leg takes more ticks than there are buckets
    if (message.is_bucket_wire) {
      const BucketRange range("collective", (*buckets_)[number], round);
      start_rest_of_pieces(number, round);
    } else {
      const Range range("collective", number + round, message.wires);
      start_rest_of_pieces(number, round);
    }
  }

  void start_rest_of_pieces(size_t number, size_t round) {
    auto& message = messages_[number];
    for (auto& count = message.started[round]; count < message.pieces.size(); ++count) {
      auto& piece = message.pieces[count];
      auto& lane = transport_->lanes().of(number, count);
      if (piece.added_up < round) {
        wait(piece);
        transport_->add_up(round - 1, lane, piece);
        bucket_of(number).note_use_of_wire(piece.room);
        piece.added_up = round;
      }
      start(round, lane, piece);
    }
  }

  void start(size_t round, c10d::ProcessGroup& lane, Piece& piece) {
    const WithoutPythonObjects without;
    try {
      transport_->start(round, lane, piece);
    } catch (...) {
      piece.sent += piece.works.size();
      throw;
    }
    piece.sent = 0;
  }

  // Waits for the sum of a leg.
  void wait(const Bucket& bucket, size_t leg) {
    const BucketRange range("wait", bucket, leg * rounds() + rounds() - 1);
    for (auto& piece : messages_[message_of(bucket, leg)].pieces) wait(piece);
  }

  // Waits once: gloo's messages cannot be waited for again. All waits for the legs of one message are on the same stream.
  void wait(Piece& piece) {
    const auto works = std::exchange(piece.works, {});
    who_waits_.wait_for(works, piece.wire.device());
  }

  Works works_of(const Message& message) const {
    Works all;
    for (const auto& piece : message.pieces) all.insert(all.end(), piece.works.begin(), piece.works.end());
    return all;
  }

  // Forgets all messages from the bucket's first leg up to the next bucket's, or all later ones after the last bucket. Called
  // after their last use.
  void forget_window(const Bucket& bucket) {
    const auto next = std::ranges::upper_bound(carried_, bucket.index(), {}, &Bucket::index);
    const auto end = next == carried_.end() ? messages_.size() : (*next)->index();
    for (auto number = bucket.index(); number < end; ++number) {
      for (const auto& wire : messages_[number].wires) bucket_of(number).note_use_of_wire(wire);
      for (const auto& sum : messages_[number].sums) bucket_of(number).note_use_of_wire(sum);
      messages_[number].forget_window();
    }
  }

  // --------------------------------------------------------------------- note [A window that fails], exchange.h

  void abandon(size_t number, size_t round, double value) {
    auto& message = messages_[number];
    need_wires(number);
    if (!message.is_void) make_void(number, round, value);
    message.is_void = true;
    start_rest(number, round);
    for (auto& piece : message.pieces) {
      // Of a window that failed.
      wait(piece);
    }
  }

  // Does not touch a bucket's wire, where gradients live: from this round on, another one travels in its place. A codec's
  // wires go through all their rounds, because the ranks' sum has to come out of them. Only pieces not started yet become void.
  void make_void(size_t number, size_t round, double value) {
    auto& message = messages_[number];
    const auto instead = split(void_wires(number, value));
    if (message.is_bucket_wire) {
      set_pieces(number, instead);
      for (auto& piece : message.pieces) piece.added_up = round;
      return;
    }
    set_pieces(number, split(message.wires));
    if (round > 0) return;
    for (auto i = message.started[0]; i < message.pieces.size(); ++i) message.pieces[i].wire.copy_(instead[i]);
  }

  std::vector<at::Tensor> void_wires(size_t number, double value) {
    const auto& message = messages_[number];
    if (message.is_bucket_wire) {
      auto& bucket = (*buckets_)[number];
      if (is_symmetric_ && !bucket.wire.exists()) bucket.wire.make(bucket.layout);
      const auto wire = is_symmetric_ ? bucket.wire.tensor() : bucket.layout.empty_wire();
      codec_->fill_void(0, bucket, wire, value);
      return {wire};
    }
    std::vector<at::Tensor> wires;
    for (const auto& wire : message.wires) wires.push_back(at::zeros_like(wire));
    for (const auto& place : message.places) {
      codec_->fill_void(place.leg, (*buckets_)[place.bucket], place.in(wires), value);
    }
    return wires;
  }

  const std::shared_ptr<Codec> codec_;
  const std::shared_ptr<Transport> transport_;
  std::optional<Share> share_;  // none: the pipeline carries all buckets
  std::vector<Bucket>* buckets_ = nullptr;
  const SideStreams* side_streams_ = nullptr;
  std::vector<Bucket*> carried_;
  std::vector<Message> messages_;
  bool is_captured_ = false;   // a window was captured, and its graph uses the wires
  bool is_symmetric_ = false;  // buckets' wires are in symmetric memory
  WhoWaits who_waits_;
};

}  // namespace

std::unique_ptr<Exchange> make_pipeline(std::shared_ptr<Codec> codec, std::shared_ptr<Transport> transport) {
  return std::make_unique<Pipeline>(std::move(codec), std::move(transport));
}

}  // namespace fastddp
