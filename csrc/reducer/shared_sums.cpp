#include "reducer/shared_sums.h"

#include <c10/core/GradMode.h>

#include "bucket/gradient_memory.h"
#include "device/see.h"
#include "reducer/errors.h"

namespace fastddp {

void SharedSums::note(const Weighting& weighting, int rank, const Window& window, const Buckets& buckets) {
  if (weighting.kind != Weighting::Kind::sum || rank == 0) return;
  const auto parameters = buckets.parameters().size();
  counts_elsewhere_.resize(parameters, false);
  are_sums_.clear();
  for (size_t parameter = 0; parameter < parameters; ++parameter) {
    are_sums_.emplace_back(buckets.gradient(parameter));
    if (window.expects_all() || window.used(parameter) != Used::no) counts_elsewhere_[parameter] = true;
  }
  any_ = true;
}

void SharedSums::zero(const Buckets& buckets, size_t parameter, bool by_layer) {
  if (!counts_elsewhere(parameter)) return;
  const auto& gradient = buckets.gradient(parameter);
  TORCH_CHECK(!by_layer || !gradient.defined() || are_sums_[parameter].is_untouched(gradient), "fastddp: ",
              buckets.describe(parameter), kWrittenIntoSum, see("FD049"));
  counts_elsewhere_[parameter] = false;
  const c10::AutoGradMode no_grad(false);
  if (gradient.defined()) about_to_write(gradient).zero_();
}

}  // namespace fastddp
