#include <algorithm>
#include <utility>

#include "pipeline/exchange.h"

namespace fastddp {
namespace {

// Note [An exchange for each bucket]
// One of several exchanges carries each bucket. Every tick calls all exchanges, in the same order on all ranks. The exchange
// that carries the tick's bucket begins it. The others continue with later legs and rounds of their buckets. So the order of all
// collectives depends only on the plan and on which exchange carries which bucket. A bucket counts as started when the slowest
// exchange would have started it, since buckets end in the plan's order.
class PerBucket : public Exchange {
 public:
  PerBucket(std::vector<std::shared_ptr<Exchange>> exchanges, std::vector<size_t> of_buckets)
      : exchanges_(std::move(exchanges)), of_buckets_(std::move(of_buckets)) {
    TORCH_CHECK_VALUE(!exchanges_.empty(), "fastddp: no exchange to carry the buckets");
    for (size_t number = 0; number < exchanges_.size(); ++number) {
      const auto* group = exchanges_[number]->group();
      TORCH_CHECK_VALUE(group != nullptr && group == this->group(),
                        "fastddp: exchanges that share buckets go over one process group, and number ", number,
                        " goes over another one than number 0");
      Share share{{}, number, exchanges_.size()};
      for (const auto owner : of_buckets_) share.carries.push_back(owner == number);
      exchanges_[number]->carry(std::move(share));
    }
    for (const auto owner : of_buckets_) {
      TORCH_CHECK_VALUE(owner < exchanges_.size(), "fastddp: there is no exchange ", owner, " among ",
                        exchanges_.size());
    }
  }

  void set_average(const Average& average) override {
    for (const auto& exchange : exchanges_) exchange->set_average(average);
  }

  c10d::ProcessGroup* group() const override { return exchanges_.front()->group(); }

  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const override {
    std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> all;
    for (const auto& exchange : exchanges_) std::ranges::copy(exchange->groups(), std::back_inserter(all));
    return all;
  }

  // Null if any exchange sends something else than collectives.
  c10d::ProcessGroup* lane(size_t number) const override {
    const auto sends_collectives = [](const auto& exchange) { return exchange->lane(0) != nullptr; };
    if (!std::ranges::all_of(exchanges_, sends_collectives)) return nullptr;
    for (const auto& exchange : exchanges_) {
      if (auto* const lane = exchange->lane(number)) return lane;
    }
    return nullptr;
  }

  double scale() const override { return exchanges_.front()->scale(); }

  void prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) override {
    fits_ = buckets.size() == of_buckets_.size();
    if (!fits_) return;  // another exchange is made for these buckets
    for (const auto& exchange : exchanges_) exchange->prepare(buckets, side_streams, slabs);
  }

  size_t lag() const override {
    size_t most = 0;
    for (const auto& exchange : exchanges_) most = std::max(most, exchange->lag());
    return most;
  }

  void on_gradient(Bucket& bucket, size_t member) override { of(bucket).on_gradient(bucket, member); }

  void let_wires_go() override {
    for (const auto& exchange : exchanges_) exchange->let_wires_go();
  }

  // If an exchange raised, its next call starts only the rest, because it counts what it has started.
  void tick(size_t tick) override {
    TORCH_CHECK(fits_, kOtherBuckets);
    for (const auto& exchange : exchanges_) exchange->tick(tick);
  }

  bool arrived(const Bucket& bucket) const override { return of(bucket).arrived(bucket); }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    of(bucket).when_arrived(bucket, std::move(call));
  }

  void finish(Bucket& bucket) override { of(bucket).finish(bucket); }

  void discard(Bucket& bucket, size_t member) override { of(bucket).discard(bucket, member); }

  void keep() override {
    for (const auto& exchange : exchanges_) exchange->keep();
  }

  void undo(const at::Tensor& only_if) override {
    for (const auto& exchange : exchanges_) exchange->undo(only_if);
  }

  std::function<void()> start_late(Bucket& bucket) override { return exchanges_.front()->start_late(bucket); }

  const std::vector<at::Tensor>& measure(Bucket& bucket) override { return of(bucket).measure(bucket); }

  void abandon(size_t tick, double value) override {
    TORCH_CHECK(fits_, kOtherBuckets);
    for (const auto& exchange : exchanges_) exchange->abandon(tick, value);
  }

  void recover(Bucket& bucket) override { of(bucket).recover(bucket); }

  void drain() override {
    for (const auto& exchange : exchanges_) exchange->drain();
  }

 private:
  static constexpr auto kOtherBuckets = "fastddp: what carries each bucket was chosen for other buckets";

  Exchange& of(const Bucket& bucket) const { return *exchanges_[of_buckets_.at(bucket.index())]; }

  const std::vector<std::shared_ptr<Exchange>> exchanges_;
  const std::vector<size_t> of_buckets_;
  bool fits_ = false;
};

}  // namespace

std::unique_ptr<Exchange> make_per_bucket(std::vector<std::shared_ptr<Exchange>> exchanges,
                                          std::vector<size_t> of_buckets) {
  return std::make_unique<PerBucket>(std::move(exchanges), std::move(of_buckets));
}

}  // namespace fastddp
