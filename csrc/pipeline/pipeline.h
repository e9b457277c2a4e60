// The exchange that fastddp runs itself.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bucket/wire_memory.h"
#include "pipeline/exchange.h"
#include "pipeline/message.h"
#include "transport/registered_memory.h"
#include "transport/works.h"

namespace fastddp {

// Note [Messages]
// A leg of a bucket travels after the leg before has gone through all rounds of its transport. So each leg has its tick, counted
// from the bucket's, and goes through one round in each tick from then on. Legs that start in one tick over one transport are a
// *message*. Those of one dtype share a wire, and so a collective: in each window PowerSGD takes one collective for each bucket,
// and one more.
//
// Note [Wires of messages]
// Wires are made when a window first needs them. Lent wires (note [Lent wires], bucket/wire.h) are made in every window, and so
// are their sums. A slab (note [Slabs], transport/registered_memory.h) has a place for the transport's room, too. It serves the
// transport of the first leg: in two levels, the links of a node.
// Either all ranks send from symmetric memory, or none. So if a window fails, what travels instead is written to the wire
// itself there, and gradients do not live in that wire.
// A wire is zeroed on the stream that is current when it is made. The codec always writes after that. It writes a first leg
// after the bucket has waited for its producers. It writes a later leg on a side stream. If that leg travels with first legs,
// the wire was made one tick before, and the side stream has waited for the streams of that tick.
//
// Note [Collectives that were started]
// If the second piece of a wire cannot be sent, the first one is still on its way. drain() has to wait for it, and abandon()
// must not send it again: other ranks would take it for the next window's. So a piece is counted as soon as it has started, by
// message and round, until the window is over.

// Buckets are encoded by a codec, and each of its legs is sent by a transport.
class Pipeline : public Exchange {
 public:
  // All legs go by `transport`.
  Pipeline(std::shared_ptr<Codec> codec, std::shared_ptr<Transport> transport);
  // The ranks of a node add up their gradients. `outer` sends the sums to the ranks in the same place of other nodes. The result
  // goes to all ranks of the node: note [Two levels of a bucket], codec/node_codec.cpp. `remembers`: `outer` depends on earlier
  // windows, and needs an average over nodes, not a sum. `spreads`: false where gradients are sharded over the node.
  static std::unique_ptr<Pipeline> two_levels(const Pipeline& outer, const std::shared_ptr<Sharding>& shards,
                                              const c10::intrusive_ptr<c10d::ProcessGroup>& all, const Lanes& node,
                                              bool remembers, bool spreads);

  // Gradients travel as `whole` would send them, but each rank gets its own run alone: note [Sharded gradients],
  // bucket/own_shard.h. ValueError: it sends several legs, or by a transport that has no half.
  static std::unique_ptr<Pipeline> sharded(const Pipeline& whole, const std::shared_ptr<Sharding>& sharding);

  void set_weighting(const Weighting& weighting) override {
    weighting_ = weighting;
    transports_.front()->set_weighting(weighting);
  }
  c10d::ProcessGroup* group() const override { return group_.get(); }
  c10d::ProcessGroup* lane(size_t number) const override;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const override {
    std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> all{group_};
    for (const auto& transport : transports_) std::ranges::copy(transport->lanes().all(), std::back_inserter(all));
    return all;
  }
  std::optional<size_t> status_tick() const override {
    return with_status_ == nullptr ? std::nullopt : std::optional(with_status_->tick);
  }
  void status_is_written_by(WriteStatus write) override { write_status_ = std::move(write); }
  Status take_status() override;
  double scale() const override { return weighting_.scale(group_->getSize()); }
  size_t lag() const override { return delays_.back() + transports_.back()->rounds() - 1; }
  void prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) override;
  void on_gradient(Bucket& bucket, size_t member) override {
    need_wires(stretches_.front(), bucket.index());
    codec_->on_gradient(bucket, member, scale_before(0, bucket));
  }
  // If it raised, its next call starts only the rest, because what was started is counted.
  void tick(size_t tick) override {
    check_fits();
    in_window_ = true;
    for (auto& stretch : stretches_) this->tick(stretch, tick);
  }
  bool arrived(const Bucket& bucket) override;
  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    when_done(last_message(bucket).works(), call);
  }
  void finish(Bucket& bucket) override;
  void let_wires_go() override;
  void discard(Bucket& bucket, size_t member) override { codec_->discard(bucket, member); }
  void keep() override { codec_->keep(); }
  void undo(const at::Tensor& only_if) override { codec_->undo(only_if); }
  const std::vector<at::Tensor>& measure(Bucket& bucket) override { return codec_->measure(bucket); }
  std::function<void()> start_late(Bucket& bucket) override;
  void abandon(size_t tick, double value) override;
  void recover(Bucket& bucket) override;
  void drain() override;

 private:
  using Transports = std::vector<std::shared_ptr<Transport>>;

  // `transports`: by leg. Legs that follow each other may share one.
  Pipeline(std::shared_ptr<Codec> codec, Transports transports, c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Legs that share a transport, from `first` up to `end`, and the messages in which they travel, by tick.
  struct Stretch {
    size_t first;
    size_t end;
    std::vector<Message> messages;
  };

  void check_fits() const { TORCH_CHECK(fits_, "fastddp: how gradients travel was chosen for other buckets"); }
  const Message& message_of(const Bucket& bucket, size_t leg) const;
  Message& message_of(const Bucket& bucket, size_t leg);
  const Message& last_message(const Bucket& bucket) const { return message_of(bucket, codec_->legs() - 1); }
  Message& last_message(const Bucket& bucket) { return message_of(bucket, codec_->legs() - 1); }
  template <typename Function>
  void for_messages(const Function& function);
  template <typename Function>
  void for_later_rounds(Stretch& stretch, size_t tick, const Function& function);
  c10::ScalarType dtype_of(size_t leg, Bucket& bucket) const {
    const auto format = codec_->format(leg, bucket);
    return format ? format->dtype : codec_->carrier(leg, bucket).layout.format().dtype;
  }
  double scale_before(size_t leg, Bucket& bucket) const { return transports_[leg]->scale_before(dtype_of(leg, bucket)); }

  bool has_room_for_status(Bucket& last) const;
  void make_room_for_status(Bucket& last);
  void write_status(Message& message, const std::vector<at::Tensor>& wires);
  Message lay_out(const Stretch& stretch, size_t tick) const;
  void add_leg(Message& message, Message::Leg leg) const;
  void reserve(Message& message, Slabs* slabs);
  std::vector<Message::Format> beside(const Message& message, bool gives_room) const;
  void need_wires(Stretch& stretch, size_t tick);
  void need_wires(Message& message);

  void tick(Stretch& stretch, size_t tick);
  void begin(Stretch& stretch, size_t tick);
  void encode_later_legs(Message& message);
  void send(Message& message);
  void set_pieces(Message& message, const std::vector<at::Tensor>& wires) const;
  uint32_t tag(const Message& message, size_t piece) const;
  void start_rest(Message& message, size_t round);
  void start_rest_of_pieces(Message& message, size_t round);
  void start(const Message& message, size_t round, c10d::ProcessGroup& lane, Piece& piece) const;
  void complete(const Message& message, size_t round, Piece& piece);
  void wait_for_sum(size_t leg, Bucket& bucket);
  void forget_window(const Bucket& bucket);

  void abandon(Message& message, size_t round, double value);
  void make_void(Message& message, size_t round, double value);
  std::vector<at::Tensor> void_wires(Message& message, double value);

  const std::shared_ptr<Codec> codec_;
  const Transports transports_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  Weighting weighting_;
  std::vector<size_t> delays_;  // by leg: ticks after the bucket's own
  const SideStreams* side_streams_ = nullptr;
  std::vector<Bucket*> buckets_;
  std::vector<Stretch> stretches_;
  bool fits_ = false;          // the codec was made for these buckets
  bool is_captured_ = false;   // a window was captured, and its graph uses the wires
  bool is_symmetric_ = false;  // buckets' wires are in symmetric memory
  bool in_window_ = false;     // a tick has begun
  bool is_of_others_ = false;  // this rank has no inputs in the window that it abandons
  bool was_drained_ = false;   // the window has failed here, so nothing of it is left to relay
  WhoWaits who_waits_;
  Message* with_status_ = nullptr;              // null: none has room for it
  std::optional<Message::Place> status_place_;  // if it is not the tail of a bucket's wire
  at::Tensor status_;                           // what travels, or has come
  WriteStatus write_status_;
};

}  // namespace fastddp
