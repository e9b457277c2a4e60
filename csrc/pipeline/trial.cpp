#include "pipeline/trial.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "device/busy.h"

namespace fastddp {
namespace {

std::vector<at::Tensor> without_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> detached;
  for (const auto& parameter : parameters) detached.push_back(parameter.detach());
  return detached;
}

}  // namespace

Trial::Trial(std::vector<at::Tensor> parameters, std::shared_ptr<Exchange> exchange)
    : buckets_(without_gradients(parameters), std::vector<std::string>(parameters.size(), "trial"), {}, GradientForm{}),
      exchange_(std::move(exchange)) {
  TORCH_CHECK_VALUE(!parameters.empty(), "fastddp: a trial takes a parameter at least");
  Plan plan(1, std::vector<size_t>(parameters.size()));
  std::iota(plan.front().begin(), plan.front().end(), 0);
  buckets_.replace(std::move(plan), [](size_t) { return false; });
  exchange_->called_under(mutex_);
  const std::lock_guard lock(mutex_);
  exchange_->prepare(buckets_.all(), buckets_.side_streams(), nullptr);
}

double Trial::seconds() {
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  const auto device = buckets_[0].device();
  if (!has_streams(device)) {
    const auto [begin, end] = exchange_gradients();
    return end.seconds_since(begin);
  }
  // Note [What a device takes], device/busy.h. Hosts are ahead of their devices by different times. So the first window is not
  // measured: it ends on all devices at the same moment.
  constexpr int windows = 3;
  constexpr double margin = 2.0, least = 1e-3;
  keep_busy(device, std::max(least, margin * host_seconds_));
  const auto begin = std::chrono::steady_clock::now();
  exchange_gradients();
  std::vector<Window> measured;
  for (int count = 0; count < windows; ++count) measured.push_back(exchange_gradients());
  host_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  double seconds = 0;
  for (const auto& [from, to] : measured) seconds += to.seconds_since(from);
  return seconds / windows;
}

Trial::Window Trial::exchange_gradients() {
  auto& bucket = buckets_[0];
  buckets_.reset();
  for (const auto& parameter : buckets_.parameters()) parameter.mutable_grad() = parameter.clone();
  const auto begin = Moment::now(bucket.device());
  for (size_t member = 0; member < bucket.size(); ++member) {
    bucket.arrive(member, /*exclusive=*/true);
    exchange_->on_gradient(bucket, member);
  }
  for (size_t tick = 0; tick <= exchange_->lag(); ++tick) exchange_->tick(tick);
  {
    // Orders no gradients.
    const auto on_side_streams = buckets_.side_streams().make_current();
    exchange_->finish(bucket);
  }
  // Orders no gradients.
  buckets_.side_streams().current_streams_wait();
  return {begin, Moment::now(bucket.device())};
}

std::vector<at::Tensor> Trial::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : buckets_.parameters()) gradients.push_back(parameter.grad().clone());
  return gradients;
}

}  // namespace fastddp
