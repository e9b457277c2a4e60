// Steps of optimizers: which windows belong together, and whether an optimizer has stepped with them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "autograd/backward.h"
#include "bucket/buckets.h"
#include "device/cuda_driver.h"
#include "trip/driver.h"
#include "window/window.h"

namespace fastddp {

// Note [Steps]
// What codecs remember becomes valid when an optimizer steps (note [What is remembered for good], codec.h). So a step lasts
// from one step of the optimizer to the next, with any number of windows. If no optimizer of the model has ever been seen to
// step, a forward begins one, unless gradients are still in `.grad`: then the next backward adds to them. A window that fails
// makes its step void. So does a backward that finds the last window's gradients removed, although no optimizer has stepped
// with them: the loop has skipped the step.
//
// All functions are called with the reducer's lock held, except may_be_skipped().
class Steps {
 public:
  Steps(Buckets& buckets, const Window& window, Driver& driver) : buckets_(buckets), window_(window), driver_(driver) {}

  // A forward with gradients.
  void forward_begins() {
    if (!are_seen_ && !window_.is(WindowState::reducing) && !adds_up()) driver_.keep();
  }
  // An optimizer of the model has stepped.
  void optimizer_stepped() {
    are_seen_ = true;
    is_unstepped_ = false;
    stepped_in_window_ = window_.has_begun();
    if (!stepped_in_window_ && !window_.is(WindowState::failed)) driver_.keep();
  }
  // As Reducer::discard_step().
  void discard(at::Tensor only_if) {
    if (only_if.defined() && only_if.is_cpu()) {
      if (only_if.item<double>() == 0.0) return;
      only_if.reset();
    }
    is_unstepped_ = false;
    const c10::AutoGradMode no_grad(false);
    driver_.undo(only_if);
  }

  // Whether to look for a skipped step: at most once in each backward. Without the lock.
  bool may_be_skipped() { return is_unstepped_ && looked_in_.exchange(Backwards::number()) != Backwards::number(); }
  // Before a backward's first gradient, and before buckets lose their marks. Gradients that are still there are added to, and
  // the same question comes again.
  void look_for_skipped() {
    if (!is_unstepped_ || !are_seen_ || window_.has_begun() || is_capturing(buckets_.device())) return;
    const c10::AutoGradMode no_grad(false);
    for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
      if (buckets_.still_holds(parameter)) return;
    }
    is_unstepped_ = false;
    if (!window_.is(WindowState::failed)) driver_.undo({});
  }

  // The window has ended well.
  void window_finished() {
    if (driver_.remembers()) {
      for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) buckets_.mark(parameter);
    }
    is_unstepped_ = !stepped_in_window_;
    if (std::exchange(stepped_in_window_, false)) driver_.keep();
  }
  // The window was void, or of other ranks only.
  void forget_window() { stepped_in_window_ = is_unstepped_ = false; }

 private:
  // Whether gradients of the last window are still in `.grad`, so that the next one adds to them. Main gradients say nothing
  // about it: they always stay.
  bool adds_up() const {
    return std::ranges::any_of(buckets_.parameters(), [](const auto& parameter) { return parameter.grad().defined(); });
  }

  Buckets& buckets_;
  const Window& window_;
  Driver& driver_;
  bool are_seen_ = false;                  // an optimizer of this model has been seen to step
  bool stepped_in_window_ = false;         // an optimizer has stepped inside this backward
  std::atomic<bool> is_unstepped_{false};  // no optimizer has stepped since the last window
  std::atomic<int> looked_in_{-1};         // the last backward in which a skipped step was looked for
};

}  // namespace fastddp
