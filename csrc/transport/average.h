// What the gradients of this rank count in the average over ranks.
#pragma once

#include <cstdint>

namespace fastddp {

// Note [The scale]
// What is wanted is said once, and knows nothing of process groups. The exchange knows which ranks it goes over, and so what
// each of them multiplies its gradients by before they are added up. Ranks of one exchange have the same kind.
struct Average {
  enum class Kind {
    mean,   // of the ranks
    sum,    // over the ranks
    share,  // the sum over the ranks of `share` times the gradient
  };

  Kind kind = Kind::mean;
  double share = 0.0;  // of this rank; may differ between windows

  double scale(int64_t ranks) const {
    switch (kind) {
      case Kind::sum:
        return 1.0;
      case Kind::share:
        return share;
      case Kind::mean:
        break;
    }
    return 1.0 / static_cast<double>(ranks);
  }
};

}  // namespace fastddp
