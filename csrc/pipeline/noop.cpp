#include "pipeline/exchange.h"

namespace fastddp {
namespace {

class Noop : public Exchange {
 public:
  c10d::ProcessGroup* group() const override { return nullptr; }
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const override { return {}; }

  double scale() const override { return 1.0; }

  void prepare(std::vector<Bucket>& buckets, const SideStreams&, Slabs*) override {
    buckets_ = &buckets;
    for (auto& bucket : buckets) bucket.wire.disable();
  }

  void on_gradient(Bucket& bucket, size_t member) override {
    if (bucket.kernels->pack_on_arrival()) bucket.measure_local({member});
  }

  void tick(size_t tick) override { (*buckets_)[tick].measure_local(); }

  bool arrived(const Bucket&) override { return true; }

  void finish(Bucket&) override {}

  std::function<void()> start_late(Bucket&) override {
    return [] {};
  }

  const std::vector<at::Tensor>& measure(Bucket& bucket) override { return bucket.measure_gradients(); }

  void abandon(size_t, double) override {}

  void drain() override {}

 private:
  std::vector<Bucket>* buckets_ = nullptr;
};

}  // namespace

std::unique_ptr<Exchange> make_noop() {
  return std::make_unique<Noop>();
}

}  // namespace fastddp
