#include "exchange.h"
#include "in_flight.h"
#include "ranges.h"

namespace fastddp {
namespace {

bool is_power_of_two(int64_t number) {
  return (number & (number - 1)) == 0;
}

class AllReduce : public Exchange {
 public:
  AllReduce(Lanes lanes, std::optional<c10::ScalarType> wire, bool divide_in_collective)
      : lanes_(std::move(lanes)), wire_(wire), divide_in_collective_(divide_in_collective) {}

  void prepare(std::vector<Bucket>& buckets) override {
    for (auto& bucket : buckets) {
      set_wire_format(bucket, wire_.value_or(bucket.gradient_dtype()), Placing::aligned);
      bucket.pieces.clear();  // those of other lanes
    }
  }

  void on_gradient(Bucket& bucket, size_t member) override {
    pack_on_arrival(bucket, member, scale(bucket));
  }

  void start(size_t, Bucket& bucket) override {
    pack(bucket, scale(bucket));
    if (bucket.pieces.empty()) bucket.pieces = lanes_.split(bucket.wire);
    const Range range("collective", bucket);
    in_flight_.add(bucket.index, reduce_over_ranks(bucket, bucket.pieces));
  }

  bool arrived(const Bucket& bucket) const override {
    return lanes_.wait_in_stream(bucket.device()) || in_flight_.completed(bucket.index);
  }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    when_done(in_flight_.of(bucket.index), call);
  }

  void finish(Bucket& bucket) override {
    wait(bucket);
    unpack(bucket, bucket.wire);
  }

  void abandon(size_t, Bucket& bucket, double value) override {
    wait_for(reduce_over_ranks(bucket, lanes_.split(filled_wire(bucket, value))));
  }

  bool arrives_within(const Bucket& bucket, std::chrono::milliseconds time) override {
    return lanes_.wait_in_stream(bucket.device()) || in_flight_.complete_within(bucket.index, time);
  }

  void exchange_late(Bucket& bucket) override {
    bucket.wire.mul_(factor_ / static_cast<double>(lanes_.ranks()));
    lanes_.sum(bucket.wire);
  }

  void drain() override {
    in_flight_.drain();
  }

 private:
  // Note [The divisor], exchange.h: by pack, in fp32 (fp64 for fp64), or by the collective (NCCL's average multiplies by
  // 1/ranks before it adds too, but in the wire's dtype: for 16 bits only a power of two gives the same values).
  bool collective_divides(const Bucket& bucket) const {
    const bool rounds_alike = c10::elementSize(bucket.wire_dtype) >= 4 || is_power_of_two(lanes_.ranks());
    return divide_in_collective_ && rounds_alike && lanes_.backend(bucket.device()) == "nccl";
  }

  double scale(const Bucket& bucket) const {
    return collective_divides(bucket) ? factor_ : factor_ / static_cast<double>(lanes_.ranks());
  }

  void wait(const Bucket& bucket) {
    const Range range("wait", bucket);
    in_flight_.wait(bucket.index);
  }

  Works reduce_over_ranks(const Bucket& bucket, const std::vector<at::Tensor>& pieces) {
    c10d::AllreduceOptions options;
    options.reduceOp = collective_divides(bucket) ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    Works works;
    for (const auto& piece : pieces) {
      std::vector<at::Tensor> tensors{piece};
      works.push_back(lanes_.of(bucket.index, works.size()).allreduce(tensors, options));
    }
    return works;
  }

  const Lanes lanes_;
  const std::optional<c10::ScalarType> wire_;
  const bool divide_in_collective_;
  InFlight in_flight_;
};

}  // namespace

std::unique_ptr<Exchange> make_all_reduce(Lanes lanes, std::optional<c10::ScalarType> wire, bool divide_in_collective) {
  return std::make_unique<AllReduce>(std::move(lanes), wire, divide_in_collective);
}

}  // namespace fastddp
