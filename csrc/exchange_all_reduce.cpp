#include <ATen/ops/full_like.h>

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "exchange.h"

namespace fastddp {
namespace {

// With several lanes, a wire is dealt over them in pieces of this size: a bucket that one large parameter makes much
// longer than the others would keep one lane busy at the end of backward, with nothing left for the others.
constexpr int64_t kPieceBytes = 25 << 20;

// What the backend of a device does that others do not.
bool is_nccl(c10d::ProcessGroup& group, c10::Device device) {
  return group.getBackend(device.type())->getBackendName() == "nccl";
}

// Whether Work::wait makes the current stream wait, not the calling thread. Where this says no without need, unpack
// comes later than it could, and nothing worse.
bool waits_in_stream(c10d::ProcessGroup& group, c10::Device device) {
  return has_streams(device) && is_nccl(group, device);
}

bool is_power_of_two(int64_t number) {
  return (number & (number - 1)) == 0;
}

class AllReduce : public Exchange {
 public:
  AllReduce(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> lanes, bool divide_in_collective)
      : lanes_(std::move(lanes)), divide_in_collective_(divide_in_collective) {}

  void on_gradient(Bucket& bucket, size_t member) override {
    pack_on_arrival(bucket, member, scale(bucket));
  }

  void start(size_t, Bucket& bucket) override {
    pack(bucket, scale(bucket));
    if (bucket.pieces.empty()) bucket.pieces = split(bucket.wire);
    in_flight_[bucket.index] = reduce_over_ranks(bucket, bucket.pieces);
  }

  bool arrived(const Bucket& bucket) const override {
    return waits_in_stream(*lanes_.front(), bucket.device()) ||
           std::ranges::all_of(in_flight_.at(bucket.index), &c10d::Work::isCompleted,
                               [](auto& work) -> c10d::Work& { return *work; });
  }

  void finish(Bucket& bucket) override {
    const auto works = in_flight_.extract(bucket.index).mapped();
    for (const auto& work : works) work->wait();
    unpack(bucket, bucket.wire);
  }

  // Ranks whose window did not fail get NaN from this one: an average over some of the ranks would pass for a
  // gradient.
  void abandon(Bucket& bucket) override {
    const auto not_a_gradient = at::full_like(bucket.wire, std::numeric_limits<double>::quiet_NaN());
    for (const auto& work : reduce_over_ranks(bucket, split(not_a_gradient))) work->wait();
  }

  void drain() override {
    for (const auto& [index, works] : in_flight_) {
      for (const auto& work : works) {
        try {
          work->wait();
        } catch (const std::exception&) {
          // The window has already failed, with an error of its own.
        }
      }
    }
    in_flight_.clear();
  }

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  // Note [The divisor]
  // Gradients are multiplied by 1/ranks before they are added up, in fp32 (fp64 for fp64): by pack, or by the collective
  // (NCCL's average does just this, but in the wire's dtype: for 16 bits only a power of two gives the same values).
  bool collective_divides(const Bucket& bucket) const {
    const bool rounds_alike = bucket.wire.element_size() >= 4 || is_power_of_two(lanes_.front()->getSize());
    return divide_in_collective_ && rounds_alike && is_nccl(*lanes_.front(), bucket.device());
  }

  double scale(const Bucket& bucket) const {
    return collective_divides(bucket) ? 1.0 : 1.0 / lanes_.front()->getSize();
  }

  std::vector<at::Tensor> split(const at::Tensor& wire) const {
    const auto bytes = static_cast<int64_t>(wire.nbytes());
    return wire.tensor_split(lanes_.size() == 1 ? 1 : std::max<int64_t>(1, bytes / kPieceBytes));
  }

  Works reduce_over_ranks(const Bucket& bucket, const std::vector<at::Tensor>& pieces) {
    c10d::AllreduceOptions options;
    options.reduceOp = collective_divides(bucket) ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    Works works;
    for (const auto& piece : pieces) {
      std::vector<at::Tensor> tensors{piece};
      works.push_back(lanes_[(bucket.index + works.size()) % lanes_.size()]->allreduce(tensors, options));
    }
    return works;
  }

  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> lanes_;
  bool divide_in_collective_;
  std::unordered_map<size_t, Works> in_flight_;  // by bucket
};

}  // namespace

std::unique_ptr<Exchange> make_all_reduce(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> lanes,
                                          bool divide_in_collective) {
  return std::make_unique<AllReduce>(std::move(lanes), divide_in_collective);
}

}  // namespace fastddp
