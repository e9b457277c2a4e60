// Since when backward stands still, for another thread that looks now and then.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>

namespace fastddp {

// Written by the thread that runs backward, in steps that took no time too: so it is a few stores, without a lock. Read by
// any thread: what it reads may be over by then, so it counts only when it has lasted.
class WaitClock {
 public:
  struct Reading {
    size_t window;
    size_t complete;  // buckets whose gradients are all there on this rank, the first ones of the plan
    double seconds;
  };

  // While it lives, the calling thread may wait for other ranks. Of two, one inside the other, the outer one counts.
  class Wait {
   public:
    Wait(WaitClock& clock, size_t window, size_t complete) : clock_(clock.since_ == kNever ? &clock : nullptr) {
      if (!clock_) return;
      clock_->window_ = window;
      clock_->complete_ = complete;
      clock_->since_ = now();
    }
    ~Wait() {
      if (clock_) clock_->since_ = kNever;
    }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    WaitClock* const clock_;
  };

  // None: nothing is waited for.
  std::optional<Reading> read() const {
    const auto since = since_.load();
    if (since == kNever) return std::nullopt;
    const Reading reading{window_, complete_, std::chrono::duration<double>(Ticks(now() - since)).count()};
    if (since_ != since) return std::nullopt;  // another wait, whose numbers these may be
    return reading;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Ticks = Clock::duration;
  static constexpr Ticks::rep kNever = 0;

  static Ticks::rep now() { return Clock::now().time_since_epoch().count(); }

  std::atomic<Ticks::rep> since_{kNever};
  std::atomic<size_t> window_{0};
  std::atomic<size_t> complete_{0};
};

}  // namespace fastddp
