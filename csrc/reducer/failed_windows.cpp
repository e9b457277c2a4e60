// Windows that fail, and windows of other ranks: note [A window that fails], trip/driver.h.
#include <c10/core/GradMode.h>

#include <limits>

#include "device/cuda_driver.h"
#include "errors/see.h"
#include "reducer/reducer.h"

namespace fastddp {

// Waits for nothing: an exception may be on its way to its caller.
void Reducer::notice_failure() {
  const auto& backward = backwards_.last();
  if (window_.is_open() && backward.raised()) {
    const auto error = backward.error();
    fail_here("raised (" + error.substr(0, error.find('\n')) + ")");
  }
  if (!window_.is(WindowState::idle) && !window_.is(WindowState::finished)) return;
  if (closing_.has_failed_late()) fail();
}

// A device that has failed runs nothing that could repair the window: its error is raised in each forward.
void Reducer::repair() {
  check_device(buckets_.device());
  const auto turn = reduction_.conduct();
  const c10::AutoGradMode no_grad(false);
  const auto unsaid = closing_.failure().take_unsaid();
  if (unsaid == Failure::Unsaid::warning) TORCH_WARN(closing_.failure().text());
  driver_.void_what_was_done();
  // Other ranks get NaN from this one: an average over some of the ranks would pass for a gradient.
  closing_.say({.window = window_.ended() - 1, .failed = true, .lost_a_backward = backwards_.lost_one()});
  if (window_.owes()) driver_.abandon_rest(std::numeric_limits<double>::quiet_NaN());
  const bool others_go_on = window_.owes() && closing_.abandon(driver_);
  if (!others_go_on) driver_.undo({});
  steps_.forget_window();
  idle_steps_ = 0;  // all ranks have raised
  driver_.give_back();
  apply(WindowEvent::repair);
  TORCH_CHECK(unsaid != Failure::Unsaid::error, closing_.failure().text(), see("FD010"));
}

void Reducer::shadow_window() {
  const std::lock_guard lock(mutex_);
  check_between_windows("a rank can take part in others' windows");
  const auto turn = reduction_.conduct();
  const c10::AutoGradMode no_grad(false);
  apply(WindowEvent::stand_aside);
  steps_.forget_window();
  driver_.keep();  // a window counts as a step here: this rank's optimizer does not step, but others' do
  closing_.say({.window = window_.ended() - 1, .lost_a_backward = backwards_.lost_one()});
  driver_.abandon_rest(0.0);
  const bool is_well = closing_.abandon(driver_);
  if (!is_well) driver_.undo({});
  driver_.keep();
  driver_.give_back();
  begin_window();
}

}  // namespace fastddp
