#include "reducer/failure.h"

namespace fastddp {

void Failure::happened_here(const std::string& what, size_t window) {
  text_ = "fastddp: the backward of synchronised step " + std::to_string(window + 1) + " " + what + " on rank " +
          std::to_string(rank_) +
          ". The gradients of that step are void on all ranks: each of them raises before it steps with them, or, where "
          "that is known too late, at its next forward.";
  unsaid_ = Unsaid::warning;
}

void Failure::happened_elsewhere(const std::string& what, size_t window) {
  text_ = "fastddp: the backward of synchronised step " + std::to_string(window + 1) + " " + what +
          ", so the gradients of that step are void on all ranks, rank " + std::to_string(rank_) +
          " too. What happened there says the error of that backward, and a warning at the next forward there. Restart; "
          "or, to go on, catch both errors, call zero_grad() on all ranks, and continue with the next forward.";
  unsaid_ = Unsaid::nothing;
}

void Failure::found_later(const std::string& what, size_t window) {
  happened_elsewhere(what, window);
  text_ +=
      " On this device that is known only now: where an optimizer has stepped meanwhile, parameters hold NaN. Load the last "
      "checkpoint.";
  unsaid_ = Unsaid::error;
}

}  // namespace fastddp
