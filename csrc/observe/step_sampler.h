// When things happen in a window, for every n-th one: on devices by events, on the CPU by the clock.
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

namespace fastddp {

// What a rank is at, in turn. Its own time is that of all but `waiting`.
enum class Phase : uint8_t {
  waiting,    // for other ranks: what they do together before a forward, and behind the last gradient
  outside,    // none of the others: data loading, logging, evaluation
  forward,    // in the module
  loss,       // between a forward and its backward
  backward,   // until the last gradient
  hook,       // a communication hook of the user's, and its pack
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
  double blocked;     // how long backward stood still until then: its thread waited for collectives
  double rest_start;  // behind all buckets: what ranks used, sparse gradients, late ones
  double rest_end;
  double end;   // backward returns; what follows on its stream has averaged gradients
  double next;  // the next window's first forward began
  // Phases of the rank's own, by name: how long they took, until the next window's first forward began, without the time that a
  // thread stood still in them, waiting for collectives.
  std::map<std::string, double> own;
};

// A step of which moments are noted; once it is over, what they were.
class SampledStep {
 public:
  SampledStep(c10::Device device, size_t window)
      : window(window), device_(device), begin_(Moment::now(device)), phases_{{begin_, Phase::waiting}} {}

  const size_t window;  // its number
  // Whether the device has got to its end too, so that times() would not keep the host waiting.
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

  void mark_end(size_t bucket);
  std::map<std::string, double> own() const;

  const c10::Device device_;
  const Moment begin_;
  std::chrono::steady_clock::duration blocked_{};
  std::optional<Moment> computed_, rest_start_, rest_end_, end_, next_;
  std::vector<OfBucket> buckets_;
  std::vector<Entry> phases_;
  std::array<std::chrono::steady_clock::duration, kPhases> waited_{};
  mutable std::mutex ends_;  // process groups' threads mark the ends of buckets
};

// Outside of sampled windows every function is one test.
class StepSampler {
 public:
  // The window of number `first`, and every n-th one from there on; 0: none.
  void set_every(size_t windows, size_t first) {
    every_ = windows;
    first_ = first;
  }

  // `window`: its number.
  void step_begins(c10::Device device, size_t window);
  void backward_begins(size_t buckets);
  // Buckets are numbered, and lie on a device: those on another one than the step's are left out.
  void ready(size_t bucket, c10::Device device);    // the first time counts
  void started(size_t bucket, c10::Device device);  // its first collective
  // To be called, from any thread, when the last collective of a bucket is done; null: nobody asks.
  std::function<void()> when_arrived(size_t bucket, c10::Device device) const;
  void finished(size_t bucket, c10::Device device);
  void enters(Phase phase);
  Phase phase() const;
  // In the current phase a thread stood still.
  void blocked(std::chrono::steady_clock::duration time);
  void computed();
  void rest_begins();
  void rest_ends();
  void window_ends();
  void window_failed() { current_.reset(); }

  // Buckets become others.
  void forget() {
    current_.reset();
    ended_.reset();
    last_.reset();
  }

  // The last sampled window that has ended, once the next one has begun.
  std::shared_ptr<const SampledStep> last() const { return last_; }

 private:
  bool samples(c10::Device device) const { return current_ && device == current_->device_; }
  bool is_due(size_t window) const { return every_ > 0 && window >= first_ && (window - first_) % every_ == 0; }
  // Of which phases are noted; null: of none.
  SampledStep* open() const { return current_ ? current_.get() : ended_.get(); }

  void mark(std::optional<Moment> SampledStep::* moment);

  size_t every_ = 0;
  size_t first_ = 0;
  std::shared_ptr<SampledStep> current_;
  std::shared_ptr<SampledStep> ended_;  // the next window has not begun
  std::shared_ptr<SampledStep> last_;
};

}  // namespace fastddp
