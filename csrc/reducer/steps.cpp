#include "reducer/steps.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "device/cuda_driver.h"

namespace fastddp {

// Whether gradients of the last window are still in `.grad`, so that the next one adds to them. Main gradients say nothing
// about it: they always stay.
bool Steps::adds_up() const {
  const auto is_there = [](const at::Tensor& parameter) { return parameter.grad().defined(); };
  return std::ranges::any_of(buckets_.parameters(), is_there);
}

void Steps::discard(at::Tensor only_if) {
  if (only_if.defined() && only_if.is_cpu()) {
    if (only_if.item<double>() == 0.0) return;
    only_if.reset();
  }
  is_unstepped_ = false;
  const c10::AutoGradMode no_grad(false);
  ticks_.exchange().undo(only_if);
}

void Steps::look_for_skipped() {
  if (!is_unstepped_ || !are_seen_ || window_.has_begun() || is_capturing(buckets_.device())) return;
  const c10::AutoGradMode no_grad(false);
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (buckets_.still_holds(parameter)) return;
  }
  is_unstepped_ = false;
  if (!window_.is(WindowState::failed)) ticks_.exchange().undo({});
}

}  // namespace fastddp
