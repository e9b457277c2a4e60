#include "reducer/shared_sums.h"

#include <c10/core/GradMode.h>

#include "bucket/gradient_memory.h"

namespace fastddp {

void SharedSums::note(const Weighting& weighting, int rank, const Window& window, size_t parameters) {
  if (weighting.kind != Weighting::Kind::sum || rank == 0) return;
  counts_elsewhere_.resize(parameters, false);
  for (size_t parameter = 0; parameter < parameters; ++parameter) {
    if (window.expects_all() || window.used(parameter) != Used::no) counts_elsewhere_[parameter] = true;
  }
  any_ = true;
}

void SharedSums::zero(const Buckets& buckets, size_t parameter) {
  if (!counts_elsewhere(parameter)) return;
  counts_elsewhere_[parameter] = false;
  const auto& gradient = buckets.gradient(parameter);
  const c10::AutoGradMode no_grad(false);
  if (gradient.defined()) about_to_write(gradient).zero_();
}

}  // namespace fastddp
