// Windows that fail, on this rank or on another one: notes [A backward that raises], backward.h, [Status of a window],
// window/status.h, and [A window that fails], exchange.h.
#include <limits>
#include <utility>

#include "reducer/reducer.h"

namespace fastddp {
namespace {

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

constexpr auto kSteppedWithNan =
    " On this device that is known only now: where an optimizer has stepped meanwhile, parameters hold NaN. Load the last "
    "checkpoint.";

}  // namespace

WindowState Reducer::state() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) notice_failure();  // if not, another thread is at work here, and nothing has raised
  return state_;
}

std::string Reducer::failure() {
  const std::lock_guard lock(mutex_);
  notice_failure();
  if (state_ != WindowState::failed) return "";
  if (unsaid_ == Unsaid::error) unsaid_ = Unsaid::nothing;  // who asks says it
  return failure_;
}

size_t Reducer::windows() {
  const std::lock_guard lock(mutex_);
  notice_failure();
  return windows_;
}

void Reducer::give_up() {
  const std::lock_guard lock(mutex_);
  if (state_ == WindowState::partial) fail_here("left parameters without a gradient");
}

void Reducer::notice_failure() {
  const bool is_open =
      state_ == WindowState::armed || state_ == WindowState::reducing || state_ == WindowState::partial;
  if (is_open && backward_.raised()) fail_here("raised (" + first_line(backward_.error()) + ")");
  if (state_ != WindowState::idle && state_ != WindowState::finished) return;
  if (const auto late = status_.take_late_failure()) {
    fail_elsewhere(late->what, late->window);
    failure_ += kSteppedWithNan;
    unsaid_ = Unsaid::error;
  }
}

// Nothing is waited for here: this is the way of an exception to its caller.
void Reducer::fail_here(const std::string& what) {
  failure_ =
      "fastddp: the backward of synchronised step " + std::to_string(windows_ + 1) + " " + what + " on rank " +
      std::to_string(process_group_->getRank()) +
      ". The gradients of that step are void on all ranks: each of them raises before it steps with them, or, where that "
      "is known too late, at its next forward.";
  unsaid_ = Unsaid::warning;
  end_failed_window();
  ++windows_;
}

void Reducer::fail_elsewhere(const std::string& what, size_t window) {
  failure_ =
      "fastddp: the backward of synchronised step " + std::to_string(window + 1) + " " + what +
      ", so the gradients of that step are void on all ranks, rank " + std::to_string(process_group_->getRank()) +
      " too. What happened there says the error of that backward, and a warning at the next forward there. Restart; or, "
      "to go on, catch both errors, call zero_grad() on all ranks, and continue with the next forward.";
  unsaid_ = Unsaid::nothing;
  end_failed_window();
}

void Reducer::end_failed_window() {
  state_ = WindowState::failed;
  step_is_open_ = false;
  window_.end();
  sampler_.window_failed();
}

// Two windows at a time there are not, so a forward that may open one waits for the backward of another thread.
void Reducer::let_backward_elsewhere_end() {
  constexpr auto patience = std::chrono::minutes(10);
  const auto begin = std::chrono::steady_clock::now();
  while (backward_.runs()) {
    TORCH_CHECK(
        std::chrono::steady_clock::now() - begin < patience,
        "fastddp: a forward was called while a backward of the same model ran in another thread, which has not ended "
        "for ",
        patience.count(), " minutes. If that one waits for this thread, call the model after backward.");
    const Unlocked unlocked(mutex_);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Other ranks get NaN from this one: an average over some of the ranks would pass for a gradient.
void Reducer::repair() {
  const Conductor::Turn turn(conductor_, mutex_);
  constexpr auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto unsaid = std::exchange(unsaid_, Unsaid::nothing);
  if (unsaid == Unsaid::warning) TORCH_WARN(failure_);
  const c10::AutoGradMode no_grad(false);
  // Nothing that is in flight may write to wires once the next window uses them.
  {
    const auto on_side_streams = side_streams_.make_current();
    exchange_->drain();
  }
  // Of a window that failed.
  side_streams_.synchronize();
  void_gradients();
  abandon_rest(nan);
  if (exchanges_status()) {
    const bool is_told = status_.is_sent();
    if (!is_told) send_status(/*failed=*/true);
    if (!status_is_received_) host_waits_for_status();
    if (is_told && !status_.failed()) abandon_what_follows_status(SparseStandIn::not_a_number, nan);
  }
  reset_window();
  state_ = WindowState::idle;
  TORCH_CHECK(unsaid != Unsaid::error, failure_);
}

// The caller may have set gradients to zero before something in flight wrote to them once more.
void Reducer::void_gradients() {
  for (auto& bucket : buckets_) zero_wire(bucket);
  for (size_t index = 0; index < finished_buckets_; ++index) {
    auto& bucket = buckets_[index];
    if (!has_streams(bucket.device())) continue;  // what the host has written was there before the exception
    for (size_t member = 0; member < bucket.members.size(); ++member) {
      const auto& gradient = bucket.parameters[member].grad();
      if (gradient.defined() && !bucket.gradients[member].in_wire) about_to_write(gradient).zero_();
    }
  }
}

void Reducer::abandon_rest(double value) {
  for (; ticks_ < ticks_of_a_window(); ++ticks_) exchange_->abandon(ticks_, value);
  while (finished_buckets_ < buckets_.size()) exchange_->recover(buckets_[finished_buckets_++]);
}

// Of a window of which this rank has said that it is well.
void Reducer::abandon_what_follows_status(SparseStandIn stand_in, double value) {
  if (usage_.settles_at_end() && !status_is_received_) usage_.see(status_.used());
  if (!sparse_is_sent_) {
    std::vector<at::Tensor> nothing(sparse_.size());
    sum_over_ranks(nothing, stand_in);
  }
  auto late = late_buckets();
  while (late_sent_ < late.size()) {
    auto& next = late[late_sent_];
    make_wire(next);
    next.wire.fill_(value);
    const auto wait = exchange_->start_late(next);
    ++late_sent_;
    wait();
  }
}

void Reducer::shadow_window() {
  const std::lock_guard lock(mutex_);
  check_between_windows("a rank can take part in others' windows");
  const Conductor::Turn turn(conductor_, mutex_);
  const c10::AutoGradMode no_grad(false);
  reset_window();
  abandon_rest(0.0);
  if (exchanges_status()) {
    send_status(/*failed=*/false);
    host_waits_for_status();
    if (!status_.failed()) abandon_what_follows_status(SparseStandIn::nothing, 0.0);
  }
  reset_window();
  ++windows_;
  state_ = WindowState::idle;
  step_is_open_ = false;
}

}  // namespace fastddp
