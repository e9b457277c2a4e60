#include <algorithm>

#include "exchange.h"
#include "in_flight.h"
#include "ranges.h"
#include "shards.h"

namespace fastddp {
namespace {

// Note [Wide sums]
// An allreduce in two halves, with a sum of our own between them: rank r receives shard r of every rank's wire, adds them up
// in fp32, and sends the result to all. Half the bytes of fp32 travel, and each value is rounded twice, whatever the number
// of ranks: once by pack and once after the sum.
class WideSum : public Exchange {
 public:
  WideSum(Lanes lanes, c10::ScalarType wire) : lanes_(std::move(lanes)), wire_(wire) {}

  void prepare(std::vector<Bucket>& buckets) override {
    received_.assign(buckets.size(), {});
    for (auto& bucket : buckets) {
      set_wire_format(bucket, wire_, Placing::aligned, lanes_.ranks());
      bucket.pieces.clear();  // those of other lanes
    }
    if (!buckets.empty()) shards_ = make_shards(lanes_.backend(buckets.front().device()));
  }

  size_t collectives() const override {
    return 2;
  }

  void on_gradient(Bucket& bucket, size_t member) override {
    pack_on_arrival(bucket, member, scale());
  }

  void start(size_t stage, Bucket& bucket) override {
    stage == 0 ? scatter(bucket) : add_up_and_gather(bucket);
  }

  bool arrived(const Bucket& bucket) const override {
    if (lanes_.wait_in_stream(bucket.device())) return true;
    return std::ranges::all_of(received_[bucket.index],
                               [&](const auto& received) { return in_flight_.completed(received.tag); });
  }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    Works all;
    for (const auto& received : received_[bucket.index]) append(all, in_flight_.of(received.tag));
    when_done(all, call);
  }

  void finish(Bucket& bucket) override {
    wait(bucket);
    unpack(bucket, bucket.wire);
  }

  void abandon(size_t stage, Bucket& bucket, double value) override {
    const auto wire = filled_wire(bucket, value);
    const auto pieces = lanes_.split(wire, lanes_.ranks(), kPieceBytes);
    Works works;
    for (size_t i = 0; i < pieces.size(); ++i) {
      auto& group = lanes_.of(bucket.index, i);
      // As if this rank had added up its shard.
      const auto own = pieces[i].view({lanes_.ranks(), -1})[group.getRank()];
      Received received{tag(bucket, i), own.repeat(lanes_.ranks())};
      append(works,
             stage == 0 ? shards_->scatter(group, pieces[i], received) : shards_->gather(group, pieces[i], received));
    }
    wait_for(works);
  }

  void exchange_late(Bucket& bucket) override {
    bucket.wire.mul_(scale());
    lanes_.sum(bucket.wire);
  }

  void drain() override {
    in_flight_.drain();
  }

 private:
  // While one piece is added up, others travel.
  static constexpr int64_t kPieceBytes = 16 << 20;

  double scale() const {
    return factor_ / static_cast<double>(lanes_.ranks());
  }

  static uint32_t tag(const Bucket& bucket, size_t piece) {
    constexpr size_t most = 256;
    TORCH_CHECK(piece < most, "fastddp: bucket ", bucket.index, " of ", bucket.elements(),
                " elements is too long to travel in ", most, " pieces");
    return static_cast<uint32_t>(bucket.index * most + piece);
  }

  static void append(Works& works, Works more) {
    works.insert(works.end(), more.begin(), more.end());
  }

  void wait(const Bucket& bucket) {
    const Range range("wait", bucket, 1);
    for (const auto& received : received_[bucket.index]) in_flight_.wait(received.tag);
  }

  void scatter(Bucket& bucket) {
    pack(bucket, scale());
    const Range range("collective", bucket, 0);
    if (bucket.pieces.empty()) bucket.pieces = lanes_.split(bucket.wire, lanes_.ranks(), kPieceBytes);
    auto& all = received_[bucket.index];
    for (size_t i = 0; i < bucket.pieces.size(); ++i) {
      if (i == all.size()) all.push_back({tag(bucket, i), {}});
      in_flight_.add(all[i].tag, shards_->scatter(lanes_.of(bucket.index, i), bucket.pieces[i], all[i]));
    }
  }

  void add_up_and_gather(Bucket& bucket) {
    auto& all = received_[bucket.index];
    const Range range("collective", bucket, 1);
    for (size_t i = 0; i < bucket.pieces.size(); ++i) {
      auto& group = lanes_.of(bucket.index, i);
      in_flight_.wait(all[i].tag);
      shards_->add_up(group, bucket.pieces[i], all[i]);
      in_flight_.add(all[i].tag, shards_->gather(group, bucket.pieces[i], all[i]));
    }
  }

  const Lanes lanes_;
  const c10::ScalarType wire_;
  std::unique_ptr<Shards> shards_;
  std::vector<std::vector<Received>> received_;  // by bucket and piece
  InFlight in_flight_;
};

}  // namespace

std::unique_ptr<Exchange> make_wide_sum(Lanes lanes, c10::ScalarType wire) {
  return std::make_unique<WideSum>(std::move(lanes), wire);
}

}  // namespace fastddp
