#include <algorithm>
#include <unordered_map>

#include "exchange.h"
#include "in_flight.h"
#include "ranges.h"
#include "shards.h"

namespace fastddp {
namespace {

// Note [Wide sums]
// An allreduce in two halves, with a sum of our own between them: rank r receives shard r of every rank's wire, adds them up
// in fp32, and sends the result to all. Half the bytes of fp32 travel, and each value is rounded twice, whatever the number
// of ranks: once by pack and once after the sum. Over several nodes with several ranks each there are four quarters and
// three roundings: note [Two levels], levels.h.
class WideSum : public Exchange {
 public:
  WideSum(Lanes lanes, c10::ScalarType wire, Nodes nodes)
      : lanes_(std::move(lanes)), wire_(wire), nodes_(std::move(nodes)) {
    TORCH_CHECK_VALUE(static_cast<int64_t>(nodes_.size()) == lanes_.ranks(), "fastddp: the nodes of ", nodes_.size(),
                      " ranks do not fit a process group of ", lanes_.ranks());
  }

  c10d::ProcessGroup* group() const override {
    return lanes_.first();
  }

  void prepare(std::vector<Bucket>& buckets) override {
    received_.assign(buckets.size(), {});
    stand_ins_.clear();
    if (buckets.empty()) return;
    const auto device = buckets.front().device();  // the others' are of the same type
    shards_ = make_shards(lanes_.backend(device), device, nodes_, lanes_.of(0, 0).getRank());
    for (auto& bucket : buckets) {
      set_wire_format(bucket, wire_, Placing::aligned, shards_->unit());
      bucket.pieces.clear();  // those of other lanes
    }
  }

  size_t collectives() const override {
    return shards_ ? shards_->rounds() : 1;
  }

  void on_gradient(Bucket& bucket, size_t member) override {
    pack_on_arrival(bucket, member, scale());
  }

  void start(size_t stage, Bucket& bucket) override {
    started_.forget(place(bucket, stage));
    stage == 0 ? begin(bucket) : add_up_and_continue(stage, bucket);
  }

  bool arrived(const Bucket& bucket) const override {
    return std::ranges::all_of(received_[bucket.index],
                               [&](const auto& received) { return in_flight_.arrived(received.tag, bucket.device()); });
  }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    Works all;
    for (const auto& received : received_[bucket.index]) append(all, in_flight_.of(received.tag));
    when_done(all, call);
  }

  void finish(Bucket& bucket) override {
    forget(bucket);
    wait(bucket);
    unpack(bucket, bucket.wire);
  }

  // The sums of this rank's shards are for all: it adds up what it is sent, as ever.
  void abandon(size_t stage, Bucket& bucket, double value) override {
    const bool first = stage == 0 || !stand_ins_.contains(bucket.index);
    if (first) stand_ins_[bucket.index] = make_stand_in(bucket, stage, value);
    auto& [pieces, received] = stand_ins_[bucket.index];
    started_.start_rest(place(bucket, stage), pieces.size(), [&](size_t i) {
      if (!first) shards_->add_up(stage - 1, lanes_.of(bucket.index, i), pieces[i], received[i]);
      start(stage, bucket, i, pieces[i], received[i]);
    });
    // Of a window that failed.
    for (const auto& of_piece : received) in_flight_.wait(of_piece.tag, bucket.device());
  }

  void recover(Bucket& bucket) override {
    forget(bucket);
  }

  std::function<void()> start_late(Bucket& bucket) override {
    bucket.wire.mul_(scale());
    return [work = lanes_.start_sum(bucket.wire)] { work->wait(); };
  }

  void drain() override {
    in_flight_.drain();
  }

 private:
  // While one piece is added up, others travel.
  static constexpr int64_t kPieceBytes = 16 << 20;

  // What travels in place of a wire from the stage on in which it is abandoned.
  struct StandIn {
    std::vector<at::Tensor> pieces;
    std::vector<Received> received;
  };

  // Pieces of the stage that were started before, if only in part, go on with what they receive.
  StandIn make_stand_in(const Bucket& bucket, size_t stage, double value) {
    const auto wire = filled_wire(bucket, value);
    StandIn result{lanes_.split(wire, shards_->unit(), kPieceBytes), {}};
    auto& all = received_[bucket.index];
    const auto started = started_.count(place(bucket, stage));
    for (size_t i = 0; i < result.pieces.size(); ++i) {
      const bool goes_on = i < started || (i < all.size() && all[i].started > 0);
      result.received.push_back(goes_on ? all[i] : Received{tag(bucket, i), {}});
    }
    for (auto& received : all) received.started = 0;
    return result;
  }

  static uint32_t tag(const Bucket& bucket, size_t piece) {
    constexpr size_t most = 256;
    TORCH_CHECK(piece < most, "fastddp: bucket ", bucket.index, " of ", bucket.elements(),
                " elements is too long to travel in ", most, " pieces");
    return static_cast<uint32_t>(bucket.index * most + piece);
  }

  // Note [Collectives that were started], in_flight.h.
  size_t place(const Bucket& bucket, size_t stage) const {
    return collectives() * bucket.index + stage;
  }

  void forget(const Bucket& bucket) {
    for (size_t stage = 0; stage < collectives(); ++stage) started_.forget(place(bucket, stage));
    stand_ins_.erase(bucket.index);
  }

  static void append(Works& works, Works more) {
    works.insert(works.end(), more.begin(), more.end());
  }

  void wait(const Bucket& bucket) {
    const Range range("wait", bucket, collectives() - 1);
    for (const auto& received : received_[bucket.index]) in_flight_.wait(received.tag, bucket.device());
  }

  void begin(Bucket& bucket) {
    pack(bucket, scale());
    const Range range("collective", bucket, 0);
    if (bucket.pieces.empty()) bucket.pieces = lanes_.split(bucket.wire, shards_->unit(), kPieceBytes);
    auto& all = received_[bucket.index];
    started_.start_rest(place(bucket, 0), bucket.pieces.size(), [&](size_t i) {
      if (i == all.size()) all.push_back({tag(bucket, i), {}});
      start(0, bucket, i, bucket.pieces[i], all[i]);
    });
  }

  void add_up_and_continue(size_t stage, Bucket& bucket) {
    auto& all = received_[bucket.index];
    const Range range("collective", bucket, stage);
    started_.start_rest(place(bucket, stage), bucket.pieces.size(), [&](size_t i) {
      in_flight_.wait(all[i].tag, bucket.device());
      shards_->add_up(stage - 1, lanes_.of(bucket.index, i), bucket.pieces[i], all[i]);
      start(stage, bucket, i, bucket.pieces[i], all[i]);
    });
  }

  void start(size_t stage, const Bucket& bucket, size_t number, const at::Tensor& piece, Received& received) {
    Works works;
    try {
      shards_->start(stage, lanes_.of(bucket.index, number), piece, received, works);
    } catch (...) {
      in_flight_.add(received.tag, works);
      received.started += works.size();
      throw;
    }
    in_flight_.add(received.tag, works);
    received.started = 0;
  }

  const Lanes lanes_;
  const c10::ScalarType wire_;
  const Nodes nodes_;
  std::unique_ptr<Shards> shards_;
  std::vector<std::vector<Received>> received_;    // by bucket and piece
  std::unordered_map<size_t, StandIn> stand_ins_;  // by bucket
  Started started_;
  InFlight in_flight_;
};

}  // namespace

std::unique_ptr<Exchange> make_wide_sum(Lanes lanes, c10::ScalarType wire, Nodes nodes) {
  return std::make_unique<WideSum>(std::move(lanes), wire, std::move(nodes));
}

}  // namespace fastddp
