#include <ATen/ops/zeros_like.h>

#include <future>
#include <map>

#include "exchange.h"
#include "in_flight.h"
#include "ranges.h"

namespace fastddp {
namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;

// The hook divides, or does whatever it does instead.
constexpr double kUnscaled = 1.0;

class PythonHook : public Exchange {
 public:
  explicit PythonHook(std::unique_ptr<c10d::CommHookInterface> hook) : hook_(std::move(hook)) {}

  void prepare(std::vector<Bucket>& buckets) override {
    for (auto& bucket : buckets) set_wire_format(bucket, bucket.gradient_dtype(), Placing::without_gaps);
  }

  void on_gradient(Bucket& bucket, size_t member) override {
    pack_on_arrival(bucket, member, kUnscaled);
  }

  void start(size_t, Bucket& bucket) override {
    pack(bucket, kUnscaled);
    const Range range("collective", bucket);
    in_flight_[bucket.index] = run(bucket, bucket.wire);
  }

  bool arrived(const Bucket& bucket) const override {
    return in_flight_.at(bucket.index)->completed();
  }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    in_flight_.at(bucket.index)->addCallback([call = std::move(call)](c10::ivalue::Future&) { call(); });
  }

  void finish(Bucket& bucket) override {
    const auto future = in_flight_.at(bucket.index);
    in_flight_.erase(bucket.index);
    {
      const Range range("wait", bucket);
      future->waitAndThrow();
    }
    unpack(bucket, checked(hook_->parseHookResult(future->value()), bucket));
  }

  // The hook may keep state from what it sees, which has to survive: it gets zeros, not the NaN that others would
  // notice.
  void abandon(size_t, Bucket& bucket, double) override {
    try {
      run(bucket, at::zeros_like(empty_wire(bucket)))->wait();
    } catch (const std::exception& error) {
      TORCH_WARN("fastddp: the communication hook raised for bucket ", bucket.index,
                 " of a window that had already failed: ", error.what());
    }
  }

  // One bucket more, behind those of the plan.
  void exchange_late(Bucket& bucket) override {
    const auto future = run(bucket, bucket.wire);
    future->waitAndThrow();
    bucket.wire.copy_(checked(hook_->parseHookResult(future->value()), bucket));
  }

  void drain() override {
    for (auto& [index, future] : in_flight_) future->wait();
    in_flight_.clear();
  }

 private:
  Future run(const Bucket& bucket, const at::Tensor& buffer) {
    if (buffer.is_cpu() && one_in_flight_) wait_for_hook_in_flight();
    // A hook may keep what it gets longer than buckets live: the sizes are those of the parameters, which come with them.
    std::vector<c10::IntArrayRef> sizes(bucket.sizes.begin(), bucket.sizes.end());
    for (size_t member = 0; member < sizes.size(); ++member) {
      const auto& parameter = bucket.parameters[member];
      if (!parameter.is_complex()) sizes[member] = parameter.sizes();
    }
    c10d::GradBucket grad_bucket(bucket.index, bucket.count, buffer, bucket.offsets, bucket.lengths, sizes,
                                 bucket.parameters, std::nullopt);
    return hook_->runHook(grad_bucket);
  }

  // Note [One hook in flight]
  // Hooks that wait for a collective in a callback of another one (torch's PowerSGD does) block one of the two threads
  // that gloo has for a process group; two such buckets at once block both, for ever. On the CPU the hook of a bucket is
  // therefore called when that of the bucket before has done its work. There are also hooks that do nothing but collect until
  // the last bucket comes, so patience ends, and then hooks are called as torch's DDP calls them.
  void wait_for_hook_in_flight() {
    if (in_flight_.empty()) return;
    constexpr auto patience = std::chrono::seconds(10);
    const auto& [bucket, future] = *in_flight_.rbegin();
    const auto done = std::make_shared<std::promise<void>>();
    future->addCallback([done](c10::ivalue::Future&) { done->set_value(); });
    count_wait([&] { one_in_flight_ = done->get_future().wait_for(patience) == std::future_status::ready; });
    if (one_in_flight_) return;
    TORCH_WARN("fastddp: what the communication hook returned for bucket ", bucket, " was not done after ",
               patience.count(), " s. From now on the hook is called for the next bucket without waiting for that.");
  }

  static at::Tensor checked(const at::Tensor& result, const Bucket& bucket) {
    TORCH_CHECK(result.numel() == bucket.wire.numel() && result.device() == bucket.wire.device(),
                "fastddp: the communication hook returned a tensor of ", result.numel(), " elements on ",
                result.device(), " for bucket ", bucket.index, ", whose buffer has ", bucket.wire.numel(),
                " elements on ", bucket.wire.device(),
                ". A hook's future has to hold one tensor that is laid out like bucket.buffer().");
    const bool is_the_wire = result.data_ptr() == bucket.wire.data_ptr() && result.dtype() == bucket.wire.dtype();
    return is_the_wire ? bucket.wire : result.contiguous().view(-1);
  }

  std::unique_ptr<c10d::CommHookInterface> hook_;
  std::map<size_t, Future> in_flight_;  // by bucket
  bool one_in_flight_ = true;           // on the CPU
};

}  // namespace

std::unique_ptr<Exchange> make_python_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  return std::make_unique<PythonHook>(std::move(hook));
}

}  // namespace fastddp
