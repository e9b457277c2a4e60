// When things happen in a window, for every n-th one: on devices by events, on the CPU by the clock.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/streams.h"

namespace fastddp {

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
};

// Outside of sampled windows every function is one test.
class StepSampler {
 public:
  // The next step and every n-th one from there on; 0: no step.
  void set_every(size_t steps) {
    every_ = steps;
    steps_ = 0;
  }

  void step_begins(c10::Device device);
  void backward_begins(size_t buckets);
  // Buckets are numbered, and lie on a device: those on another one than the step's are left out.
  void ready(size_t bucket, c10::Device device);    // the first time counts
  void started(size_t bucket, c10::Device device);  // its first collective
  // To be called, from any thread, when the last collective of a bucket is done; null: nobody asks.
  std::function<void()> when_arrived(size_t bucket, c10::Device device) const;
  void finished(size_t bucket, c10::Device device);
  // Backward stood still.
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
  std::optional<StepTimes> last() const;

 private:
  // Process groups' threads mark the ends.
  struct Marks {
    explicit Marks(c10::Device device) : device(device), begin(Moment::now(device)) {}
    void mark_end(size_t bucket);

    struct OfBucket {
      std::optional<Moment> ready, start, end;
    };
    const c10::Device device;
    const Moment begin;
    std::chrono::steady_clock::duration blocked{};
    std::optional<Moment> computed, rest_start, rest_end, end, next;
    std::vector<OfBucket> buckets;
    std::mutex ends;
  };
  bool samples(c10::Device device) const { return current_ && device == current_->device; }

  void mark(std::optional<Moment> Marks::* moment);

  size_t every_ = 0;
  size_t steps_ = 0;  // since that was said
  std::shared_ptr<Marks> current_;
  std::shared_ptr<Marks> ended_;  // the next window has not begun
  std::shared_ptr<Marks> last_;
};

}  // namespace fastddp
