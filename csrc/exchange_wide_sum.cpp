#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>

#include <limits>

#include "exchange.h"
#include "in_flight.h"
#include "sum_shards.h"

// torch 2.11 knows the collectives by these names only.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

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
    for (auto& bucket : buckets) set_wire_format(bucket, wire_, lanes_.ranks());
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
    return lanes_.wait_in_stream(bucket.device()) || in_flight_.completed(bucket.index);
  }

  void finish(Bucket& bucket) override {
    in_flight_.wait(bucket.index);
    unpack(bucket, bucket.wire);
  }

  // NaN: an average over some of the ranks would pass for a gradient.
  void abandon(size_t stage, Bucket& bucket) override {
    const auto pieces =
        lanes_.split(at::full_like(empty_wire(bucket), std::numeric_limits<double>::quiet_NaN()), lanes_.ranks());
    Works works;
    for (size_t piece = 0; piece < pieces.size(); ++piece) {
      auto& group = lanes_.of(bucket.index, piece);
      const auto target = at::empty_like(pieces[piece]);
      works.push_back(stage == 0 ? exchange_shards(group, target, pieces[piece])
                                 : gather(group, target, rows(pieces[piece])));
    }
    wait_for(works);
  }

  void drain() override {
    in_flight_.drain();
  }

 private:
  double scale() const {
    return 1.0 / static_cast<double>(lanes_.ranks());
  }

  void scatter(Bucket& bucket) {
    pack(bucket, scale());
    if (bucket.pieces.empty()) bucket.pieces = lanes_.split(bucket.wire, lanes_.ranks());
    auto& received = received_[bucket.index];
    Works works;
    for (size_t piece = 0; piece < bucket.pieces.size(); ++piece) {
      if (piece == received.size()) received.push_back(at::empty_like(bucket.pieces[piece]));
      works.push_back(exchange_shards(lanes_.of(bucket.index, piece), received[piece], bucket.pieces[piece]));
    }
    in_flight_.add(bucket.index, std::move(works));
  }

  void add_up_and_gather(Bucket& bucket) {
    in_flight_.wait(bucket.index);
    Works works;
    for (size_t piece = 0; piece < bucket.pieces.size(); ++piece) {
      const auto& received = received_[bucket.index][piece];
      keep_for_current_stream(received);
      auto& group = lanes_.of(bucket.index, piece);
      const auto shards = rows(received);
      const auto sums = gathers_copies(bucket.device()) ? shards : shards.narrow(0, 0, 1);
      sum_shards(shards, sums);
      works.push_back(gather(group, bucket.pieces[piece], sums));
    }
    in_flight_.add(bucket.index, std::move(works));
  }

  at::Tensor rows(const at::Tensor& piece) const {
    return piece.view({lanes_.ranks(), -1});
  }

  // What travels are bytes: backends need not know the dtype.
  static c10::intrusive_ptr<c10d::Work> exchange_shards(c10d::ProcessGroup& group, const at::Tensor& target,
                                                        const at::Tensor& source) {
    auto output = target.view(at::kByte), input = source.view(at::kByte);
    std::vector<int64_t> equal;
    return group.alltoall_base(output, input, equal, equal);
  }

  // Gloo's gather goes through memory of its own, twice; sending a copy of the same to each rank is three times as fast.
  bool gathers_copies(c10::Device device) const {
    return lanes_.backend(device) == "gloo";
  }

  // `sums`: a copy for each rank, or one.
  c10::intrusive_ptr<c10d::Work> gather(c10d::ProcessGroup& group, const at::Tensor& target,
                                        const at::Tensor& sums) const {
    if (gathers_copies(target.device())) return exchange_shards(group, target, sums.view(-1));
    auto output = target.view(at::kByte), input = sums[0].view(at::kByte);
    return group._allgather_base(output, input);
  }

  const Lanes lanes_;
  const c10::ScalarType wire_;
  std::vector<std::vector<at::Tensor>> received_;  // by bucket and piece
  InFlight in_flight_;
};

}  // namespace

std::unique_ptr<Exchange> make_wide_sum(Lanes lanes, c10::ScalarType wire) {
  return std::make_unique<WideSum>(std::move(lanes), wire);
}

}  // namespace fastddp
