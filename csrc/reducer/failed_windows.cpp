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

// Note [Lost connections], reducer.h.
void Reducer::note_lost(const std::string& what) {
  if (!lost_) lost_ = Lost{window_.ended(), driver_.failing(), what.substr(0, what.find('\n'))};
}

void Reducer::lose() {
  closing_.failure().is_told(lost_->what);
  fail();
  const Unlocked unlocked(mutex_);
  tell_lost_(*lost_);
}

void Reducer::backward_raised() {
  const std::lock_guard lock(mutex_);
  notice_failure();
  const bool is_armed = window_.is(WindowState::armed);
  const bool may_open = open_ && !is_local_ && !window_.has_begun() && !window_.is(WindowState::failed);
  if (is_armed || may_open) ++missed_;
  if (is_armed) apply(WindowEvent::miss);
}

bool Reducer::leave(bool group_stays) {
  has_left_ = true;
  hooks_.end();
  const bool was_interrupted = interruption_->is_interrupted();
  interruption_->interrupt(kLeft);  // a backward may wait in another thread, with the lock
  const std::lock_guard lock(mutex_);
  backwards_.let_last_end(mutex_);
  notice_failure();
  steps_.look_for_skipped();
  if (has_streams(buckets_.device()) && window_.is_open() && !group_stays) (void)interruption_->abort_groups();
  const bool is_void = leave_behind(group_stays, was_interrupted || interruption_->has_raised());
  if (window_.has_begun()) fail();
  if (window_.is(WindowState::failed)) apply(WindowEvent::repair);
  return is_void;
}

// Works in flight hold what they use. Their group's destructor waits for them: note [Groups that are left], waits/interruption.h.
bool Reducer::leave_behind(bool group_stays, bool was_interrupted) {
  const c10::AutoGradMode no_grad(false);
  const bool is_void = window_.has_begun() || window_.is(WindowState::failed);
  if (is_void) driver_.leave_behind();
  if ((is_void || was_interrupted) && !group_stays) {
    auto groups = driver_.way()->groups();
    groups.push_back(process_group_);
    Interruption::bury(std::move(groups), driver_.travels());
  }
  return is_void;
}

// A device that has failed runs nothing that could repair the window: its error is raised in each forward.
void Reducer::repair() {
  check_device(buckets_.device());
  const auto turn = reduction_.conduct();
  const c10::AutoGradMode no_grad(false);
  const Interruption::Scope interruptible(*interruption_, buckets_.device());
  const auto unsaid = closing_.failure().take_unsaid();
  if (unsaid == Failure::Unsaid::warning) TORCH_WARN(closing_.failure().text());
  driver_.void_what_was_done();
  // Other ranks get NaN from this one: an average over some of the ranks would pass for a gradient.
  closing_.say({.window = window_.ended() - 1, .failed = true});
  if (window_.owes()) driver_.abandon_rest(std::numeric_limits<double>::quiet_NaN());
  const bool others_go_on = window_.owes() && closing_.abandon(driver_);
  if (!others_go_on) driver_.undo({});
  steps_.forget_window();
  missed_ = 0;  // all ranks have raised
  driver_.give_back();
  apply(WindowEvent::repair);
  TORCH_CHECK(unsaid != Failure::Unsaid::error, closing_.failure().text(), see("FD010"));
}

void Reducer::shadow_window() {
  const std::lock_guard lock(mutex_);
  check_between_windows("a rank can take part in others' windows");
  const auto turn = reduction_.conduct();
  const c10::AutoGradMode no_grad(false);
  const Interruption::Scope interruptible(*interruption_, buckets_.device());
  apply(WindowEvent::stand_aside);
  steps_.forget_window();
  driver_.keep();  // a window counts as a step here: this rank's optimizer does not step, but others' do
  closing_.say({.window = window_.ended() - 1});
  driver_.abandon_rest(0.0);
  const bool is_well = closing_.abandon(driver_);
  if (!is_well) driver_.undo({});
  driver_.keep();
  driver_.give_back();
  begin_window();
}

}  // namespace fastddp
