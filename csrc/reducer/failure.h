// What is said about a failed window, and by whom.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "errors/see.h"

namespace fastddp {

// The last window that failed. Windows are numbered from 0; users count synchronised steps from 1.
class Failure {
 public:
  explicit Failure(int rank) : rank_(rank) {}

  // What the next forward does with the text. A warning follows another error that the user has had; an error is news.
  enum class Unsaid { nothing, warning, error };

  void happened_here(const std::string& what, size_t window) {
    text_ = "fastddp: the backward of synchronised step " + std::to_string(window + 1) + " " + what + " on rank " +
            std::to_string(rank_) +
            ". The gradients of that step are void on all ranks: each of them raises before it steps with them, or, where "
            "that is known too late, at its next forward.";
    unsaid_ = Unsaid::warning;
  }
  void happened_elsewhere(const std::string& what, size_t window) {
    text_ = "fastddp: the backward of synchronised step " + std::to_string(window + 1) + " " + what +
            ", so the gradients of that step are void on all ranks, rank " + std::to_string(rank_) +
            " too. What happened there says the error of that backward, and a warning at the next forward there. Restart; "
            "or, to go on, catch both errors, call zero_grad() on all ranks, and continue with the next forward.";
    unsaid_ = Unsaid::nothing;
  }
  // It happened elsewhere, but became known only after backward had returned.
  void found_later(const std::string& what, size_t window) {
    happened_elsewhere(what, window);
    text_ +=
        " On this device that is known only now: where an optimizer has stepped meanwhile, parameters hold NaN. Load the last "
        "checkpoint.";
    unsaid_ = Unsaid::error;
  }

  const std::string& text() const { return text_; }
  // The connection to another rank was lost, and a manager has been told: note [Lost connections], reducer.h.
  void is_told(const std::string& what) {
    text_ = "fastddp: rank " + std::to_string(rank_) + " has lost its connection to another rank (" + what +
            "). The gradients of this step are void. Call regroup() with the ranks that are left, and zero_grad()." +
            see("FD052");
    unsaid_ = Unsaid::nothing;
  }
  // For somebody who asks: an error counts as said then.
  const std::string& tell() {
    if (unsaid_ == Unsaid::error) unsaid_ = Unsaid::nothing;
    return text_;
  }
  Unsaid take_unsaid() { return std::exchange(unsaid_, Unsaid::nothing); }

 private:
  const int rank_;
  std::string text_;
  Unsaid unsaid_ = Unsaid::nothing;
};

}  // namespace fastddp
