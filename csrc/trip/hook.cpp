#include "trip/hook.h"

#include <set>
#include <utility>

#include "bucket/bucket_range.h"
#include "errors/see.h"
#include "observe/progress.h"
#include "transport/works.h"
#include "trip/user_code.h"

namespace fastddp {
namespace {

// What a hook has returned, as other collectives return it.
class HookWork : public c10d::Work, public RunsUsersCode {
 public:
  explicit HookWork(Hook::Future future) : Work(-1, c10d::OpType::ALLREDUCE), future_(std::move(future)) {}

  bool isCompleted() override { return future_->completed(); }
  bool wait(std::chrono::milliseconds) override {
    future_->waitAndThrow();
    return true;
  }
  Hook::Future getFuture() override { return future_; }

 private:
  const Hook::Future future_;
};

// A GradBucket refers to sizes and does not hold them. A hook may keep its GradBucket for longer than buckets or parameters
// live. So each shape is kept for good, once.
c10::IntArrayRef kept_for_good(const std::vector<int64_t>& sizes) {
  static std::mutex mutex;
  static auto& all = *new std::set<std::vector<int64_t>>;
  const std::lock_guard lock(mutex);
  return *all.insert(sizes).first;
}

constexpr auto kWhatItShouldHold =
    ". A hook's future has to hold one tensor that is laid out like bucket.buffer(); add a .then() that takes it out of "
    "what a collective returns.";

}  // namespace

void Hook::start(c10d::ProcessGroup&, Piece& piece) const {
  const auto& bucket = (*buckets_)[piece.bucket];
  auto future = run(bucket, bucket.wire.tensor());
  in_flight_[piece.bucket] = future;
  piece.works.push_back(c10::make_intrusive<HookWork>(std::move(future)));
}

void Hook::add_up(Piece& piece) const {
  const auto future = in_flight_.extract(piece.bucket).mapped();
  piece.sum = result(*future, (*buckets_)[piece.bucket]);
}

std::function<void()> Hook::start_late(Bucket& bucket) const {
  return [this, &bucket, future = run(bucket, bucket.wire.tensor())] {
    {
      const Unlocked unlocked(*lock_);
      Interruption::wait(*future);
    }
    bucket.wire.tensor().copy_(result(*future, bucket));
  };
}

void Hook::run_void(const Bucket& bucket) const {
  try {
    const auto future = run(bucket, bucket.wire.another().zero_());
    const Unlocked unlocked(*lock_);
    future->wait();
  } catch (const std::exception& error) {
    TORCH_WARN("fastddp: the communication hook ", name_, " raised for bucket ", bucket.index(),
               " of a window that had already failed: ", error.what());
  }
}

Hook::Future Hook::run(const Bucket& bucket, const at::Tensor& buffer) const {
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
  const Unlocked unlocked(*lock_);
  return hook_->runHook(grad_bucket);
}

// Note [One hook in flight]
// Some hooks wait for a collective in a callback of another one (torch's PowerSGD does). This blocks one of the two threads
// that gloo has for a process group. Two such buckets at once block both threads for ever. So on the CPU a bucket's hook is
// called after the previous bucket's hook has finished. Other hooks only collect buckets until the last one comes. So the
// wait has a limit. After that, hooks are called as torch's DDP calls them.
void Hook::wait_for_hook_in_flight() const {
  if (in_flight_.empty()) return;
  constexpr auto patience = std::chrono::seconds(10);
  const auto [bucket, future] = *in_flight_.rbegin();
  count_wait([&, future = future] {
    const Unlocked unlocked(*lock_);
    one_in_flight_ = Interruption::wait(*future, patience);
  });
  if (one_in_flight_) return;
  TORCH_WARN("fastddp: what the communication hook ", name_, " returned for bucket ", bucket, " was not done after ",
             patience.count(), " s. From now on the hook is called for the next bucket without waiting for that.");
}

// The result of a future that is done. It may have another floating dtype, as with torch's DDP: unpack casts it.
at::Tensor Hook::result(c10::ivalue::Future& future, const Bucket& bucket) const {
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
at::Tensor Hook::tensor_in(const c10::IValue& value, const Bucket& bucket) const {
  const auto [tensor, type] = value.isPyObject() ? look_(value.toPyObject())
                                                 : Looked{value.isTensor() ? value.toTensor() : at::Tensor(), value.tagKind()};
  TORCH_CHECK_TYPE(tensor.defined(), "fastddp: the future that the communication hook ", name_, " returned for bucket ",
                   bucket.index(), " holds an object of type ", type, ", not a tensor", kWhatItShouldHold, see("FD034"));
  return tensor;
}

}  // namespace fastddp
