// Gradients that are a sum over ranks, and that the next window adds to.
#pragma once

#include <c10/core/GradMode.h>

#include <atomic>
#include <vector>

#include "bucket/buckets.h"
#include "bucket/gradient_memory.h"
#include "errors/see.h"
#include "reducer/errors.h"
#include "transport/weighting.h"
#include "window/window.h"

namespace fastddp {

// Note [What a sum holds already]
// After a window with Weighting::Kind::sum all ranks hold the same sum. If nobody zeroes it, the next window adds to it, and it
// would count once for each rank. So rank 0 keeps the sum, and the others begin with zero: just before autograd adds the first
// gradient, and where a placeholder travels in a gradient's place. This also holds if new gradients stay local until the next
// window, under no_sync or after their window. A value that a user assigns to `.grad` in place of the sum is treated like it.
// Means need none of this (the mean of equal numbers is that number), nor do shares, which add up to 1.
class SharedSums {
 public:
  SharedSums(const Buckets& buckets, const Window& window)
      : buckets_(buckets), window_(window), counts_elsewhere_(buckets.parameters().size()) {}

  // Whether zero() may have something to do. Any thread may call it without a lock.
  bool are_there() const { return any_; }

  // The window has ended well. `rank`: this rank's number in the exchange's group.
  void note(const Weighting& weighting, int rank) {
    if (weighting.kind != Weighting::Kind::sum || rank == 0) return;
    for (size_t parameter = 0; parameter < counts_elsewhere_.size(); ++parameter) {
      if (window_.used(parameter) != Used::no) counts_elsewhere_[parameter] = true;
    }
    any_ = true;
  }

  // Whether another rank holds the same sum as this gradient, and counts it.
  bool counts_elsewhere(size_t parameter) const { return counts_elsewhere_[parameter]; }

  // Before something is added to the gradient. `by_layer`: it has been, if at all, and cannot be told from the sum.
  void zero(size_t parameter, bool by_layer) {
    if (!counts_elsewhere(parameter)) return;
    const auto& gradient = buckets_.gradient(parameter);
    TORCH_CHECK(!by_layer || !gradient.defined(), "fastddp: ", buckets_.describe(parameter), kWrittenIntoSum, see("FD049"));
    counts_elsewhere_[parameter] = false;
    const c10::AutoGradMode no_grad(false);
    if (gradient.defined()) about_to_write(gradient).zero_();
  }
  // `zero_grad` of the wrapper has removed gradients, or set them to zero.
  void forget() { counts_elsewhere_.assign(counts_elsewhere_.size(), false); }

 private:
  const Buckets& buckets_;
  const Window& window_;
  std::atomic<bool> any_{false};
  std::vector<bool> counts_elsewhere_;  // by parameter
};

}  // namespace fastddp
