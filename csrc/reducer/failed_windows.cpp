// Windows that fail, and windows of other ranks: note [A window that fails], pipeline/exchange.h.
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
  const auto late = closing_.take_late_failure();
  if (!late) return;
  failure_.found_later(late->what, late->window + 1, process_group_->getRank());
  fail();
}

// A device that has failed runs nothing that could repair the window: its error is raised in each forward.
void Reducer::repair() {
  check_device(buckets_.device());
  const Conductor::Turn turn(conductor_, mutex_);
  const c10::AutoGradMode no_grad(false);
  const auto unsaid = failure_.take_unsaid();
  if (unsaid == Failure::Unsaid::warning) TORCH_WARN(failure_.text());
  ticks_.void_what_was_done();
  // Other ranks get NaN from this one: an average over some of the ranks would pass for a gradient.
  closing_.say({.window = window_.ended() - 1, .failed = true, .lost_a_backward = backwards_.lost_one()});
  if (window_.owes()) ticks_.abandon_rest(std::numeric_limits<double>::quiet_NaN());
  const bool others_go_on = window_.owes() && closing_.abandon(ticks_.exchange());
  if (!others_go_on) ticks_.exchange().undo({});
  stepped_in_window_ = is_unstepped_ = false;
  ticks_.exchange().let_wires_go();
  apply(WindowEvent::repair);
  TORCH_CHECK(unsaid != Failure::Unsaid::error, failure_.text(), see("FD010"));
}

void Reducer::repair_if_failed() {
  const std::lock_guard lock(mutex_);
  if (Backwards::is_inside_one()) return;
  notice_failure();
  if (window_.is(WindowState::failed)) repair();
}

void Reducer::shadow_window() {
  const std::lock_guard lock(mutex_);
  check_between_windows("a rank can take part in others' windows");
  const Conductor::Turn turn(conductor_, mutex_);
  const c10::AutoGradMode no_grad(false);
  apply(WindowEvent::stand_aside);
  is_unstepped_ = false;
  ticks_.exchange().keep();  // a window counts as a step here: this rank's optimizer does not step, but others' do
  closing_.say({.window = window_.ended() - 1, .lost_a_backward = backwards_.lost_one()});
  ticks_.abandon_rest(0.0);
  const bool is_well = closing_.abandon(ticks_.exchange());
  if (!is_well) ticks_.exchange().undo({});
  ticks_.exchange().keep();
  ticks_.exchange().let_wires_go();
  begin_window();
}

}  // namespace fastddp
