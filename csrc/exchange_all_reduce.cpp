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

  c10d::ProcessGroup* group() const override {
    return lanes_.first();
  }

  void prepare(std::vector<Bucket>& buckets) override {
    for (auto& bucket : buckets) {
      set_wire_format(bucket, wire_.value_or(bucket.gradient_dtype()), Placing::aligned);
      bucket.pieces.clear();  // those of other lanes
    }
  }

  void on_gradient(Bucket& bucket, size_t member) override {
    pack_on_arrival(bucket, member, scale_in_pack(bucket));
  }

  void start(size_t, Bucket& bucket) override {
    started_.forget(bucket.index);
    pack(bucket, scale_in_pack(bucket));
    if (bucket.pieces.empty()) bucket.pieces = lanes_.split(bucket.wire);
    const Range range("collective", bucket);
    reduce_over_ranks(bucket, bucket.pieces);
  }

  bool arrived(const Bucket& bucket) const override {
    return in_flight_.arrived(bucket.index, bucket.device());
  }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    when_done(in_flight_.of(bucket.index), call);
  }

  void finish(Bucket& bucket) override {
    started_.forget(bucket.index);
    wait(bucket);
    unpack(bucket, bucket.wire);
  }

  void abandon(size_t, Bucket& bucket, double value) override {
    const auto pieces = lanes_.split(filled_wire(bucket, value));
    reduce_over_ranks(bucket, pieces);
    // Of a window that failed.
    in_flight_.wait(bucket.index, bucket.device());
  }

  void recover(Bucket& bucket) override {
    started_.forget(bucket.index);
  }

  std::function<void()> start_late(Bucket& bucket) override {
    bucket.wire.mul_(scale());
    return [work = lanes_.start_sum(bucket.wire)] { work->wait(); };
  }

  void drain() override {
    in_flight_.drain();
  }

 private:
  // Gradients are scaled by pack, in fp32 (fp64 for fp64); or, for the mean, by the collective, which multiplies by 1/ranks
  // before it adds too, but in the wire's dtype: for 16 bits only a power of two gives the same values.
  bool collective_divides(const Bucket& bucket) const {
    const bool rounds_alike = c10::elementSize(bucket.wire_dtype) >= 4 || is_power_of_two(lanes_.ranks());
    return average_.kind == Average::Kind::mean && divide_in_collective_ && rounds_alike;
  }

  double scale_in_pack(const Bucket& bucket) const {
    return collective_divides(bucket) ? 1.0 : scale();
  }

  void wait(const Bucket& bucket) {
    const Range range("wait", bucket);
    in_flight_.wait(bucket.index, bucket.device());
  }

  // Note [Collectives that were started], in_flight.h.
  void reduce_over_ranks(const Bucket& bucket, const std::vector<at::Tensor>& pieces) {
    c10d::AllreduceOptions options;
    options.reduceOp = collective_divides(bucket) ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    started_.start_rest(bucket.index, pieces.size(), [&](size_t i) {
      std::vector<at::Tensor> tensors{pieces[i]};
      in_flight_.add(bucket.index, {lanes_.of(bucket.index, i).allreduce(tensors, options)});
    });
  }

  const Lanes lanes_;
  const std::optional<c10::ScalarType> wire_;
  const bool divide_in_collective_;
  Started started_;  // by bucket
  InFlight in_flight_;
};

}  // namespace

std::unique_ptr<Exchange> make_all_reduce(Lanes lanes, std::optional<c10::ScalarType> wire, bool divide_in_collective) {
  return std::make_unique<AllReduce>(std::move(lanes), wire, divide_in_collective);
}

}  // namespace fastddp
