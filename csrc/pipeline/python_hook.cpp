#include <ATen/ops/zeros_like.h>

#include <map>
#include <mutex>
#include <set>

#include "bucket/bucket_range.h"
#include "errors/see.h"
#include "observe/progress.h"
#include "pipeline/exchange.h"
#include "pipeline/reserve_wire.h"
#include "transport/works.h"

namespace fastddp {
namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;
using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

// The hook scales gradients itself if it wants to.
constexpr double kUnscaled = 1.0;

// A GradBucket refers to sizes and does not hold them. A hook may keep its GradBucket for longer than buckets or parameters
// live. So each shape is kept for good, once.
c10::IntArrayRef kept_for_good(const std::vector<int64_t>& sizes) {
  static std::mutex mutex;
  static auto& all = *new std::set<std::vector<int64_t>>;
  const std::lock_guard lock(mutex);
  return *all.insert(sizes).first;
}

class PythonHook : public Exchange {
 public:
  PythonHook(std::unique_ptr<c10d::CommHookInterface> hook, std::string name, c10::intrusive_ptr<c10d::ProcessGroup> group,
             Groups others, LookAtPython look)
      : hook_(std::move(hook)), name_(std::move(name)), group_(std::move(group)), groups_(std::move(others)), look_(look) {
    groups_.push_back(group_);
  }

  // Only the hook knows which ranks it goes over, so we take the model's.
  c10d::ProcessGroup* group() const override { return group_.get(); }

  Groups groups() const override { return groups_; }

  double scale() const override { return Weighting().scale(group_->getSize()); }

  void prepare(std::vector<Bucket>& buckets, const SideStreams&, Slabs* slabs) override {
    buckets_ = &buckets;
    for (auto& bucket : buckets) {
      bucket.set_wire_format({bucket.layout.gradient_dtype()});
      bucket.set_wire_tail(0);
      reserve_wire(bucket, *group_, slabs);
    }
  }

  void on_gradient(Bucket& bucket, size_t member) override { bucket.pack_on_arrival(member, kUnscaled); }

  void tick(size_t tick) override {
    auto& bucket = (*buckets_)[tick];
    bucket.pack(kUnscaled);
    const BucketRange range("collective", bucket);
    in_flight_[bucket.index()] = run(bucket, bucket.wire.tensor());
  }

  bool arrived(const Bucket& bucket) override { return in_flight_.at(bucket.index())->completed(); }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    in_flight_.at(bucket.index())->addCallback([call = std::move(call)](c10::ivalue::Future&) { call(); });
  }

  void finish(Bucket& bucket) override {
    const auto future = in_flight_.at(bucket.index());
    in_flight_.erase(bucket.index());
    {
      const BucketRange range("wait", bucket);
      without_lock([&] { Interruption::wait(*future); });
    }
    bucket.unpack(result(*future, bucket));
  }

  bool starts_all_in_ticks() const override { return false; }

  bool runs_user_code() const override { return true; }

  // The hook may build state from its inputs, and the state has to survive. So the hook gets zeros, although other ranks would
  // notice NaN.
  void abandon(size_t tick, double) override {
    const auto& bucket = (*buckets_)[tick];
    try {
      const auto future = run(bucket, at::zeros_like(bucket.layout.empty_wire()));
      without_lock([&] { future->wait(); });
    } catch (const std::exception& error) {
      TORCH_WARN("fastddp: the communication hook ", name_, " raised for bucket ", bucket.index(),
                 " of a window that had already failed: ", error.what());
    }
  }

  // Runs the hook for one more bucket after those of the plan.
  std::function<void()> start_late(Bucket& bucket) override {
    return [this, &bucket, future = run(bucket, bucket.wire.tensor())] {
      without_lock([&] { Interruption::wait(*future); });
      bucket.wire.tensor().copy_(result(*future, bucket));
    };
  }

  void drain() override {
    const auto in_flight = std::exchange(in_flight_, {});
    without_lock([&] {
      for (const auto& [bucket, future] : in_flight) future->wait();
    });
  }

 private:
  Future run(const Bucket& bucket, const at::Tensor& buffer) {
    if (buffer.is_cpu() && one_in_flight_) wait_for_hook_in_flight();
    const auto& layout = bucket.layout;
    std::vector<c10::IntArrayRef> sizes;
    std::vector<at::Tensor> parameters;
    for (size_t member = 0; member < layout.size(); ++member) {
      const auto& parameter = parameters.emplace_back(layout[member].like);
      auto of_member = parameter.sizes().vec();
      if (parameter.is_complex()) of_member.push_back(2);
      sizes.push_back(kept_for_good(of_member));
    }
    c10d::GradBucket grad_bucket(layout.index(), layout.count(), buffer, layout.offsets(), layout.lengths(), sizes, parameters,
                                 std::nullopt);
    const Progress::UserCode runs;
    return without_lock([&] { return hook_->runHook(grad_bucket); });
  }

  // Note [One hook in flight]
  // Some hooks wait for a collective in a callback of another one (torch's PowerSGD does). This blocks one of the two threads
  // that gloo has for a process group. Two such buckets at once block both threads for ever. So on the CPU a bucket's hook is
  // called after the previous bucket's hook has finished. Other hooks only collect buckets until the last one comes. So the
  // wait has a limit. After that, hooks are called as torch's DDP calls them.
  void wait_for_hook_in_flight() {
    if (in_flight_.empty()) return;
    constexpr auto patience = std::chrono::seconds(10);
    const auto [bucket, future] = *in_flight_.rbegin();
    const auto is_done = [&, future = future] { return Interruption::wait(*future, patience); };
    count_wait([&] { one_in_flight_ = without_lock(is_done); });
    if (one_in_flight_) return;
    TORCH_WARN("fastddp: what the communication hook ", name_, " returned for bucket ", bucket, " was not done after ",
               patience.count(), " s. From now on the hook is called for the next bucket without waiting for that.");
  }

  // The result of a future that is done. It may have another floating dtype, as with torch's DDP: unpack casts it.
  at::Tensor result(c10::ivalue::Future& future, const Bucket& bucket) const {
    const auto result = tensor_in(future.value(), bucket);
    const auto& wire = bucket.wire.tensor();
    TORCH_CHECK(result.numel() == wire.numel() && result.device() == wire.device() && result.layout() == at::kStrided &&
                    result.is_floating_point(),
                "fastddp: the communication hook ", name_, " returned a tensor of ", result.numel(), " elements, ",
                result.scalar_type(), ", ", result.layout(), ", on ", result.device(), " for bucket ", bucket.index(),
                ", whose buffer has ", wire.numel(), " elements, ", wire.scalar_type(), ", ", wire.layout(), ", on ",
                wire.device(), kWhatItShouldHold, see("FD034"));
    const bool is_the_wire = result.data_ptr() == wire.data_ptr() && result.dtype() == wire.dtype();
    return is_the_wire ? wire : result.contiguous().view(-1);
  }

  // A Python future holds a Python object. The future of a process group's collective holds a value of torch's own.
  at::Tensor tensor_in(const c10::IValue& value, const Bucket& bucket) const {
    const auto [tensor, type] = value.isPyObject() ? look_(value.toPyObject())
                                                   : Seen{value.isTensor() ? value.toTensor() : at::Tensor(), value.tagKind()};
    TORCH_CHECK_TYPE(tensor.defined(), "fastddp: the future that the communication hook ", name_, " returned for bucket ",
                     bucket.index(), " holds an object of type ", type, ", not a tensor", kWhatItShouldHold, see("FD034"));
    return tensor;
  }

  static constexpr auto kWhatItShouldHold =
      ". A hook's future has to hold one tensor that is laid out like bucket.buffer(); add a .then() that takes it out of "
      "what a collective returns.";

  const std::unique_ptr<c10d::CommHookInterface> hook_;
  const std::string name_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  Groups groups_;
  const LookAtPython look_;
  std::vector<Bucket>* buckets_ = nullptr;
  std::map<size_t, Future> in_flight_;  // by bucket
  bool one_in_flight_ = true;           // on the CPU
};

}  // namespace

std::unique_ptr<Exchange> make_python_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::string name,
                                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                                           std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> others, LookAtPython look) {
  return std::make_unique<PythonHook>(std::move(hook), std::move(name), std::move(group), std::move(others), look);
}

}  // namespace fastddp
