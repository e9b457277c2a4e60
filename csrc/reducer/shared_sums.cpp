#include "reducer/shared_sums.h"

#include <c10/core/GradMode.h>

#include "bucket/gradient_memory.h"
#include "errors/see.h"
#include "reducer/errors.h"

namespace fastddp {

void SharedSums::note(const Weighting& weighting, int rank) {
  if (weighting.kind != Weighting::Kind::sum || rank == 0) return;
  counts_elsewhere_.resize(buckets_.parameters().size(), false);
  for (size_t parameter = 0; parameter < counts_elsewhere_.size(); ++parameter) {
    if (window_.expects_all() || window_.used(parameter) != Used::no) counts_elsewhere_[parameter] = true;
  }
  any_ = true;
}

void SharedSums::zero(size_t parameter, bool by_layer) {
  if (!counts_elsewhere(parameter)) return;
  const auto& gradient = buckets_.gradient(parameter);
  TORCH_CHECK(!by_layer || !gradient.defined(), "fastddp: ", buckets_.describe(parameter), kWrittenIntoSum, see("FD049"));
  counts_elsewhere_[parameter] = false;
  const c10::AutoGradMode no_grad(false);
  if (gradient.defined()) about_to_write(gradient).zero_();
}

}  // namespace fastddp
