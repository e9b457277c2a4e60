#include <utility>

#include "bucket/own_shard.h"
#include "codec/codec.h"

namespace fastddp {
namespace {

// Note [Two levels of a bucket]
// A bucket's wire has the gradients' dtype, and gradients live there as usual. Its first leg goes over the ranks of the node, which
// add up its runs (note [Runs of a wire], transport/transport.h). The next legs are those of the *outer* codec, over the ranks in
// the same place of other nodes. To it, this rank's run is a bucket, the shard, whose gradients are parts of the run (note [Shards],
// bucket/sharding.h). In the last leg its result goes back to the ranks of the node. If the outer codec sends the
// shard's own wire as it is, that wire is a part of the bucket's, and nothing is copied. With a sharded optimizer the last leg is
// left out: the result is for this rank's spans alone (note [Sharded gradients], bucket/own_shard.h).
//
// The averaging factor is applied once, at pack, and the outer legs add up. An outer codec with error feedback needs averages over
// nodes, so pack multiplies by the number of nodes as well.
//
// Note [Two levels of a window that fails]
// Until a rank fails, it has taken part between nodes with its runs of some buckets. After that, its outer legs are void (note [A
// window that fails], pipeline/exchange.h), and so is what it sends inside the node. Its neighbours compress sums that contain its
// first legs, and their codecs remember the loss. So if the outer codec remembers, these are zeros, and other ranks notice by the
// status alone. A rank without inputs owes other nodes the sums of its neighbours. It does everything as in any window, with
// zeros for its gradients.
struct Shard {
  explicit Shard(Bucket bucket) : bucket(std::move(bucket)) {}

  Bucket bucket;
  at::Tensor bound;         // its gradients are parts of this wire: the bucket's, or what travels in its place
  bool is_decoded = false;  // in this window
};

class NodeCodec : public Codec {
 public:
  NodeCodec(std::shared_ptr<Codec> outer, std::shared_ptr<Sharding> spans, bool remembers, bool spreads)
      : outer_(std::move(outer)), spans_of_node_(std::move(spans)), remembers_(remembers), spreads_(spreads) {}

  bool fits(const std::vector<Bucket>& buckets) const override { return spans_of_node_->fit(buckets); }

  void prepare(const std::vector<Bucket*>& buckets, const std::vector<int64_t>& units) override {
    shards_.clear();
    std::vector<Bucket*> of_outer;
    for (auto* bucket : buckets) {
      bucket->set_wire_format(spans_of_node_->format_of(bucket->layout));
      auto& shard = shards_.emplace_back(std::make_unique<Shard>(spans_of_node_->make_bucket(bucket->index())));
      of_outer.push_back(&shard->bucket);
    }
    outer_->prepare(of_outer, {units.begin() + 1, spreads_ ? units.end() - 1 : units.end()});
  }

  size_t legs() const override { return outer_->legs() + (spreads_ ? 2 : 1); }

  std::optional<Format> format(size_t leg, const Bucket& bucket) const override {
    return is_outer(leg) ? outer_->format(leg - 1, of(bucket).bucket) : std::nullopt;
  }

  void place(size_t leg, const Bucket& bucket, const at::Tensor& wire, const at::Tensor& sum) override {
    outer_->place(leg - 1, of(bucket).bucket, wire, sum);
  }

  void displace(const Bucket& bucket) override { outer_->displace(of(bucket).bucket); }

  bool keeps_what_it_sent() const override { return outer_->keeps_what_it_sent(); }

  Bucket& carrier(size_t leg, Bucket& bucket) const override {
    return is_outer(leg) ? outer_->carrier(leg - 1, of(bucket).bucket) : bucket;
  }

  at::Tensor wire(size_t leg, Bucket& bucket) const override {
    if (leg == 0) return bucket.wire.tensor();
    return is_outer(leg) ? outer_->wire(leg - 1, of(bucket).bucket) : of(bucket).bound;
  }

  void note_came(size_t leg, Bucket& bucket, const at::Tensor& wire) override {
    if (leg == 0) bind(bucket, wire);
  }

  Adder* adder(size_t leg) override { return is_outer(leg) ? outer_->adder(leg - 1) : nullptr; }

  void on_gradient(Bucket& bucket, size_t member, double scale) override { bucket.pack_on_arrival(member, scale); }

  void encode(size_t leg, Bucket& bucket, double scale) override {
    if (leg == 0) return bucket.pack(scale);
    auto& shard = of(bucket);
    if (leg == 1) begin(bucket, shard);
    if (is_outer(leg)) return outer_->encode(leg - 1, shard.bucket, scale);
    decode_run(shard);
  }

  void decode(Bucket& bucket) override {
    auto& shard = of(bucket);
    if (!spreads_) {
      decode_run(shard);
      bucket.shard->take(bucket, shard.bound);
      bucket.shard->finish(bucket);
    }
    shard.is_decoded = false;
    if (spreads_) bucket.unpack(bucket.wire.tensor());
  }

  // The outer codec may remember what it sent, so it has to know about each span of the parameter.
  void discard(Bucket& bucket, size_t member) override {
    for_spans(bucket, member, [&](auto& shard, size_t span) { outer_->discard(shard, span); });
  }

  bool relays() const override { return true; }

  bool is_sharded() const override { return !spreads_; }

  void fill_void(size_t leg, const Bucket& bucket, const at::Tensor& place, double value) const override {
    if (is_outer(leg)) return outer_->fill_void(leg - 1, of(bucket).bucket, place, value);
    bucket.layout.fill(place, leg == 0 && remembers_ ? 0.0 : value);
  }

  void recover(Bucket& bucket) override {
    auto& shard = of(bucket);
    if (!std::exchange(shard.is_decoded, false)) outer_->recover(shard.bucket);
    if (!shard.bound.is_same(bucket.wire.tensor())) unbind(shard);
  }

  void keep() override { outer_->keep(); }

  void undo(const at::Tensor& only_if) override { outer_->undo(only_if); }

 private:
  bool is_outer(size_t leg) const { return leg > 0 && leg <= outer_->legs(); }

  Shard& of(const Bucket& bucket) const { return *shards_[bucket.index()]; }

  void decode_run(Shard& shard) {
    outer_->decode(shard.bucket);
    shard.is_decoded = true;
    // The memory belongs to the bucket's wire, which stays alive without this.
    // Orders no gradients.
    shard.bucket.window.kept.let_go();
  }

  // With the sums of the node in its wire. All ranks of the node drop the same placeholders.
  void begin(const Bucket& bucket, Shard& shard) {
    shard.bucket.reset();
    for (size_t member = 0; member < bucket.size(); ++member) {
      if (!bucket.window[member].may_be_dropped) continue;
      for_spans(bucket, member, [](auto& shard, size_t span) { shard.window[span].may_be_dropped = true; });
    }
  }

  // Calls function(the shard, its member) for each span of the parameter.
  template <typename Function>
  void for_spans(const Bucket& bucket, size_t member, const Function& function) const {
    auto& shard = of(bucket).bucket;
    for (size_t i = 0; i < shard.size(); ++i) {
      if (shard.layout.parameter(i) == bucket.layout.parameter(member)) function(shard, i);
    }
  }

  // Whether the shard's own wire can be this rank's run.
  bool can_share(const Bucket& shard) const {
    const auto length = shard.layout.wire_length();
    const auto& run = spans_of_node_->run(shard.index());
    const auto& format = shard.layout.format();
    const bool is_alike = format.apart == aligned(format.dtype) && shard.wire.is_home();
    return is_alike && length > 0 && length <= run.length() && spans_of_node_->offsets(shard.index()).front() == 0;
  }

  // Makes the shard's gradients parts of the wire that travels. They are the same tensors in every window while the wire is the
  // same: note [Where gradients live], bucket/bucket.h.
  void bind(Bucket& bucket, const at::Tensor& wire) {
    auto& shard = of(bucket);
    if (shard.bound.is_same(wire)) return;
    auto& inner = shard.bucket;
    const auto& [begin, end] = spans_of_node_->run(inner.index());
    const auto own = wire.narrow(0, begin, end - begin);
    const bool shares = can_share(inner);
    if (shares) inner.wire.become(inner.layout, own.narrow(0, 0, inner.layout.wire_length()));
    for (size_t i = 0; i < inner.size(); ++i) {
      const auto offset = static_cast<size_t>(spans_of_node_->offsets(inner.index())[i]);
      inner.held(i) = shares ? inner.wire.view(i) : view_of(own, inner.layout[i].like, offset);
      bucket.wire.lend(inner.held(i));
    }
    if (shares) bucket.wire.lend(inner.wire.tensor());
    shard.bound = wire;
  }

  void unbind(Shard& shard) const {
    shard.bound.reset();
    if (can_share(shard.bucket)) shard.bucket.wire.drop();
    for (size_t i = 0; i < shard.bucket.size(); ++i) shard.bucket.held(i).reset();
  }

  const std::shared_ptr<Codec> outer_;
  const std::shared_ptr<Sharding> spans_of_node_;
  const bool remembers_;
  const bool spreads_;                          // all ranks of the node get the result, not only this rank's sharded optimizer
  std::vector<std::unique_ptr<Shard>> shards_;  // by bucket
};

}  // namespace

std::unique_ptr<Codec> make_node_codec(std::shared_ptr<Codec> outer, std::shared_ptr<Sharding> shards, bool remembers,
                                       bool spreads) {
  return std::make_unique<NodeCodec>(std::move(outer), std::move(shards), remembers, spreads);
}

}  // namespace fastddp
