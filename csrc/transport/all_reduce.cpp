#include "transport/transport.h"

namespace fastddp {
namespace {

bool is_power_of_two(int64_t number) {
  return (number & (number - 1)) == 0;
}

class AllReduce : public Transport {
 public:
  AllReduce(Lanes lanes, bool divides) : Transport(std::move(lanes)), divides_(divides) {}

  void set_adder(Adder* adder) override {
    TORCH_CHECK_VALUE(adder == nullptr,
                      "fastddp: an allreduce adds up numbers, and this codec's bytes are none. Use a "
                      "sharded sum.");
  }

  double scale_before(c10::ScalarType wire) const override { return collective_divides(wire) ? 1.0 : scale(); }

  std::unique_ptr<Transport> only_sum(c10::Device device, Cut cut) const override {
    return make_shard_sum(lanes_, device, std::move(cut),
                          {.own_sums = false, .ranks = lanes_.ranks(), .times = 1.0, .is_last = true});
  }

  std::vector<at::Tensor> split(const at::Tensor& wire) const override { return lanes_.split(wire); }

  void start(size_t, c10d::ProcessGroup& lane, Piece& piece) const override {
    c10d::AllreduceOptions options;
    options.reduceOp = collective_divides(piece.wire.scalar_type()) ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    std::vector<at::Tensor> tensors{piece.wire};
    piece.works.push_back(lane.allreduce(tensors, options));
  }

 private:
  // Pack scales gradients in fp32 (fp64 for fp64). For the mean, the collective may do it instead. It too multiplies by 1/ranks
  // before it adds, but in the wire's dtype: for 16 bits only a power of two gives the same values.
  bool collective_divides(c10::ScalarType wire) const {
    const bool rounds_alike = c10::elementSize(wire) >= 4 || is_power_of_two(lanes_.ranks());
    return divides_ && weighting_.kind == Weighting::Kind::mean && rounds_alike;
  }

  const bool divides_;
};

}  // namespace

std::unique_ptr<Transport> make_all_reduce(Lanes lanes, bool divides) {
  return std::make_unique<AllReduce>(std::move(lanes), divides);
}

}  // namespace fastddp
