// When things happen in every n-th window: events time devices, the clock times the CPU.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/streams.h"
#include "observe/progress.h"

namespace fastddp {

// What the time of a step was for. It follows from what the rank does (`Doing`), except for waits and hooks. All but the first
// two are the rank's own time.
enum class Phase : uint8_t {
  waiting,    // for other ranks: joint work before a forward, and after the last gradient
  gather,     // for parameters of a sharded optimizer
  outside,    // in none of the others: data loading, logging, evaluation
  forward,    // in the module
  loss,       // between a forward and its backward
  backward,   // until the last gradient
  hook,       // in a user's communication hook, and its pack
  optimizer,  // in its step
};
inline constexpr size_t kPhases = static_cast<size_t>(Phase::optimizer) + 1;

// In ms since the window's first forward began; NaN: not known.
struct StepTimes {
  struct OfBucket {
    double ready;  // its gradients are final
    double start;  // of its first collective, after pack
    double end;    // of its last one
  };
  std::vector<OfBucket> buckets;
  double computed;    // the gradients of this rank are there
  double blocked;     // how long backward's thread waited for collectives until then
  double rest_start;  // after all buckets: which parameters ranks used, sparse gradients, late ones
  double rest_end;
  double end;   // backward returns; its stream has averaged gradients from here on
  double next;  // the next window's first forward began
  // How long the rank waited for parameters until `computed`, and from then to `next`.
  double gather_before, gather_after;
  // The rank's own phases, by name: how long they took until the next window's first forward began, without the time for which a
  // thread waited for collectives.
  std::map<std::string, double> own;
};

// A step whose moments are noted. Once it is over, times() tells them.
class SampledStep {
 public:
  SampledStep(c10::Device device, size_t window)
      : window(window), device_(device), begin_(Moment::now(device)), phases_{{begin_, Phase::waiting}} {}

  const size_t window;  // its number
  // Whether the device has reached the end too, so that times() would not make the host wait.
  bool is_over() const { return next_ && next_->has_passed(); }
  // The host waits for the device.
  StepTimes times() const;

 private:
  friend class StepSampler;
  struct OfBucket {
    std::optional<Moment> ready, start, end;
  };
  struct Entry {
    Moment at;
    Phase phase;
  };

  void mark_end(size_t bucket) {
    const std::lock_guard lock(ends_);
    if (!buckets_[bucket].end) buckets_[bucket].end = Moment::now(device_);
  }
  std::array<double, kPhases> taken() const;  // by phase
  double gathered_until(double moment) const;

  const c10::Device device_;
  const Moment begin_;
  std::chrono::steady_clock::duration blocked_{};
  std::optional<Moment> computed_, rest_start_, rest_end_, end_, next_;
  std::vector<OfBucket> buckets_;
  std::vector<Entry> phases_;
  std::array<std::chrono::steady_clock::duration, kPhases> waited_{};
  mutable std::mutex ends_;  // process groups' threads mark the ends of buckets
};

// Outside of sampled windows every function costs one test.
class StepSampler {
 public:
  // Samples window number `first` and every n-th one after it; 0: none.
  void set_every(size_t windows, size_t first) {
    every_ = windows;
    first_ = first;
  }

  // `window`: its number.
  void step_begins(c10::Device device, size_t window);
  void backward_begins(size_t buckets);
  // `device`: the bucket's. Buckets on another device than the step's are left out.
  void ready(size_t bucket, c10::Device device);    // the first time counts
  void started(size_t bucket, c10::Device device);  // its first collective
  // Returns what to call, from any thread, when the last collective of a bucket is done; null: nothing.
  std::function<void()> when_arrived(size_t bucket, c10::Device device) const;
  void finished(size_t bucket, c10::Device device);
  void enters(Phase phase);
  // The rank does something else now.
  void follows(Doing doing);
  Phase phase() const {
    const auto* const step = open();
    return step == nullptr ? Phase::waiting : step->phases_.back().phase;
  }
  // In the current phase a thread waited for collectives.
  void blocked(std::chrono::steady_clock::duration time) {
    if (auto* const step = open()) step->waited_[static_cast<size_t>(phase())] += time;
    if (current_ && !current_->computed_) current_->blocked_ += time;
  }
  void computed() {
    mark(&SampledStep::computed_);
    enters(Phase::waiting);
  }
  void rest_begins() { mark(&SampledStep::rest_start_); }
  void rest_ends() { mark(&SampledStep::rest_end_); }
  void window_ends() {
    if (!current_) return;
    mark(&SampledStep::end_);
    ended_ = std::move(current_);
  }
  void window_failed() { current_.reset(); }

  // The buckets are replaced.
  void forget() {
    current_.reset();
    ended_.reset();
    last_.reset();
  }

  // The last sampled window, once the next window has begun.
  std::shared_ptr<const SampledStep> last() const { return last_; }

 private:
  bool samples(c10::Device device) const { return current_ && device == current_->device_; }
  bool is_due(size_t window) const { return every_ > 0 && window >= first_ && (window - first_) % every_ == 0; }
  // The step whose phases are noted; null: none.
  SampledStep* open() const { return current_ ? current_.get() : ended_.get(); }

  void mark(std::optional<Moment> SampledStep::* moment) {
    if (current_) (*current_).*moment = Moment::now(current_->device_);
  }

  size_t every_ = 0;
  size_t first_ = 0;
  std::shared_ptr<SampledStep> current_;
  std::shared_ptr<SampledStep> ended_;  // its window has ended, and the next one has not begun
  std::shared_ptr<SampledStep> last_;
};

}  // namespace fastddp
