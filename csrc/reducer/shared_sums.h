// Gradients that are a sum over ranks, and get more.
#pragma once

#include <atomic>
#include <vector>

#include "bucket/buckets.h"
#include "transport/average.h"
#include "window/window.h"

namespace fastddp {

// Note [What a sum holds already]
// Behind a window with Average::Kind::sum all ranks hold the same sum. Where nobody zeroes it, and the next window adds to it, it
// would travel from each rank, and count as often as there are ranks. So one rank keeps it, and the others begin with zero: just
// before autograd adds the first gradient to it, and where a placeholder travels in a gradient's stead. A mean needs nothing of that
// kind, since the mean of equal numbers is that number; nor do shares, which add up to 1. What a user assigns to `.grad` in place of
// such a sum counts as one. So it is with gradients that stay local until the next window: under no_sync, or behind their window.
class SharedSums {
 public:
  // By any thread, without a lock: whether zero() may have something to do.
  bool are_there() const { return any_; }

  // The window has ended well, among ranks of which this one has that number.
  void note(const Average& average, int rank, const Window& window, size_t parameters);

  // Whether another rank holds what this gradient holds, and counts it.
  bool counts_elsewhere(size_t parameter) const {
    return parameter < counts_elsewhere_.size() && counts_elsewhere_[parameter];
  }

  // Before something is added to the gradient.
  void zero(const Buckets& buckets, size_t parameter);

 private:
  std::atomic<bool> any_{false};
  std::vector<bool> counts_elsewhere_;  // by parameter
};

}  // namespace fastddp
