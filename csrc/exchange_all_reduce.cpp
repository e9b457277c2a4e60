#include <ATen/ops/full_like.h>

#include <limits>
#include <unordered_map>

#include "exchange.h"

namespace fastddp {
namespace {

class AllReduce : public Exchange {
 public:
  explicit AllReduce(c10::intrusive_ptr<c10d::ProcessGroup> process_group) : process_group_(std::move(process_group)) {}

  void on_gradient(Bucket& bucket, size_t member) override {
    pack_on_arrival(bucket, member, scale());
  }

  void start(size_t, Bucket& bucket) override {
    pack(bucket, scale());
    in_flight_[bucket.index] = sum_over_ranks(bucket.wire);
  }

  bool arrived(const Bucket& bucket) const override {
    // On a device with streams nobody asks: the stream that unpacks waits there.
    return bucket.device().is_cpu() && in_flight_.at(bucket.index)->isCompleted();
  }

  void finish(Bucket& bucket) override {
    const auto work = in_flight_.extract(bucket.index).mapped();
    work->wait();
    unpack(bucket, bucket.wire);
  }

  // Ranks whose window did not fail get NaN from this one: an average over some of the ranks would pass for a
  // gradient.
  void abandon(Bucket& bucket) override {
    const auto not_a_gradient = at::full_like(bucket.wire, std::numeric_limits<double>::quiet_NaN());
    sum_over_ranks(not_a_gradient)->wait();
  }

  void drain() override {
    for (auto& [index, work] : in_flight_) {
      try {
        work->wait();
      } catch (const std::exception&) {
        // The window has already failed, with an error of its own.
      }
    }
    in_flight_.clear();
  }

 private:
  double scale() const {
    return 1.0 / process_group_->getSize();
  }

  c10::intrusive_ptr<c10d::Work> sum_over_ranks(const at::Tensor& wire) {
    std::vector<at::Tensor> tensors{wire};
    return process_group_->allreduce(tensors);
  }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::unordered_map<size_t, c10::intrusive_ptr<c10d::Work>> in_flight_;  // by bucket
};

}  // namespace

std::unique_ptr<Exchange> make_all_reduce(c10::intrusive_ptr<c10d::ProcessGroup> process_group) {
  return std::make_unique<AllReduce>(std::move(process_group));
}

}  // namespace fastddp
