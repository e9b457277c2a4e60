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

class AllReduce : public Exchange {
 public:
  explicit AllReduce(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> lanes) : lanes_(std::move(lanes)) {}

  void on_gradient(Bucket& bucket, size_t member) override {
    pack_on_arrival(bucket, member, scale());
  }

  void start(size_t, Bucket& bucket) override {
    pack(bucket, scale());
    if (bucket.pieces.empty()) bucket.pieces = split(bucket.wire);
    in_flight_[bucket.index] = sum_over_ranks(bucket, bucket.pieces);
  }

  bool arrived(const Bucket& bucket) const override {
    // On a device with streams nobody asks: the stream that unpacks waits there.
    return bucket.device().is_cpu() && std::ranges::all_of(in_flight_.at(bucket.index), &c10d::Work::isCompleted,
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
    for (const auto& work : sum_over_ranks(bucket, split(not_a_gradient))) work->wait();
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

  double scale() const {
    return 1.0 / lanes_.front()->getSize();
  }

  std::vector<at::Tensor> split(const at::Tensor& wire) const {
    const auto bytes = static_cast<int64_t>(wire.nbytes());
    return wire.tensor_split(lanes_.size() == 1 ? 1 : std::max<int64_t>(1, bytes / kPieceBytes));
  }

  Works sum_over_ranks(const Bucket& bucket, const std::vector<at::Tensor>& pieces) {
    Works works;
    for (const auto& piece : pieces) {
      std::vector<at::Tensor> tensors{piece};
      works.push_back(lanes_[(bucket.index + works.size()) % lanes_.size()]->allreduce(tensors));
    }
    return works;
  }

  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> lanes_;
  std::unordered_map<size_t, Works> in_flight_;  // by bucket
};

}  // namespace

std::unique_ptr<Exchange> make_all_reduce(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> lanes) {
  return std::make_unique<AllReduce>(std::move(lanes));
}

}  // namespace fastddp
