#include "reducer/shared_sums.h"

#include <c10/core/GradMode.h>

#include "bucket/gradient_memory.h"
#include "errors/see.h"
#include "reducer/errors.h"

namespace fastddp {

void SharedSums::note(const Weighting& weighting, int rank, const Window& window, size_t parameters) {
  if (weighting.kind != Weighting::Kind::sum || rank == 0) return;
  counts_elsewhere_.resize(parameters, false);
  for (size_t parameter = 0; parameter < parameters; ++parameter) {
    if (window.expects_all() || window.used(parameter) != Used::no) counts_elsewhere_[parameter] = true;
  }
  any_ = true;
}

void SharedSums::zero(const Buckets& buckets, size_t parameter, bool by_layer) {
  if (!counts_elsewhere(parameter)) return;
  const auto& gradient = buckets.gradient(parameter);
  TORCH_CHECK(!by_layer || !gradient.defined(), "fastddp: ", buckets.describe(parameter), kWrittenIntoSum, see("FD049"));
  counts_elsewhere_[parameter] = false;
  const c10::AutoGradMode no_grad(false);
  if (gradient.defined()) about_to_write(gradient).zero_();
}

}  // namespace fastddp
