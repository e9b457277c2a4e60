// The weight of this rank's gradients in the average over ranks.
#pragma once

#include <cstdint>

namespace fastddp {

// Note [The scale]
// A Weighting says which average is wanted, and knows nothing of process groups. The driver knows the ranks, so it derives the
// factor by which each rank multiplies its gradients before the sum. All ranks of one exchange have the same kind.
struct Weighting {
  enum class Kind {
    mean,   // over the ranks
    sum,    // over the ranks
    share,  // the sum over the ranks of `share` times the gradient
  };

  Kind kind = Kind::mean;
  double share = 0.0;  // this rank's; may differ between windows

  double scale(int64_t ranks) const {
    if (kind == Kind::mean) return 1.0 / static_cast<double>(ranks);
    return kind == Kind::sum ? 1.0 : share;
  }
};

}  // namespace fastddp
