// When things happen in every n-th window: events time devices, the clock times the CPU.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "pages/snapshot.h"

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
  double blocked;     // how long backward's thread waited for collectives until then
  double rest_start;  // after all buckets: which parameters ranks used, sparse gradients, late ones
  double rest_end;
  double end;   // backward returns; its stream has averaged gradients from here on
  double next;  // the next window's first forward began
  // How long the rank waited for parameters until `computed`, and from then to `next`.
  double gather_before, gather_after;
  // The rank's own times, by name: how long they took until the next window's first forward began, without the time for which a
  // thread waited for collectives.
  std::map<std::string, double> own;
};

// A step whose moments are noted. Once it is over, times() tells them.
class SampledStep {
 public:
  SampledStep(c10::Device device, size_t window, size_t buckets)
      : window(window), device_(device), begin_(DeviceMoment::now(device)), buckets_(buckets), parts_{{begin_, What::opens}} {}

  const size_t window;  // its number
  // Whether the device has reached the end too, so that times() would not make the host wait.
  bool is_over() const {
    const std::lock_guard lock(mutex_);
    return moments_.at({What::opens, 0}).has_passed();
  }
  // The host waits for the device.
  StepTimes times() const;

 private:
  friend class StepSampler;
  // All that follows until the next part was for `what`.
  struct Part {
    DeviceMoment begin;
    What what;
    std::chrono::steady_clock::duration waited{};  // of it, for collectives
  };

  // The first time counts.
  void note(What what, size_t bucket = 0) {
    const std::lock_guard lock(mutex_);
    if (!moments_.contains({what, bucket})) moments_.emplace(std::pair(what, bucket), DeviceMoment::now(device_));
  }
  double at(What what, size_t bucket = 0) const;
  double begin(const Part& part) const { return part.begin.seconds_since(begin_) * 1e3; }

  const c10::Device device_;
  const DeviceMoment begin_;
  const size_t buckets_;
  std::vector<Part> parts_;
  std::map<std::pair<What, size_t>, DeviceMoment> moments_;  // of a bucket, or of the step
  mutable std::mutex mutex_;                                 // process groups' threads note the ends of buckets
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
  void step_begins(c10::Device device, size_t window, size_t buckets);
  // `is_here`: on the step's device. Buckets of other devices are left out.
  void happened(const Moment& moment, bool is_here) {
    if (open() != nullptr) note(moment, is_here);
  }
  // Returns what to call, from any thread, when the last collective of a bucket is done; null: nothing.
  std::function<void()> when_arrived(size_t bucket, bool is_here) const;

  // What the time is for now.
  What part() const { return open() == nullptr ? What::opens : open()->parts_.back().what; }
  void enters(What part);
  // In the current part a thread waited for collectives.
  void blocked(std::chrono::steady_clock::duration time) {
    if (auto* const step = open()) step->parts_.back().waited += time;
  }

  // The buckets are replaced.
  void forget() {
    current_.reset();
    ended_.reset();
    last_.reset();
  }

  // The last sampled window, once the next window has begun.
  std::shared_ptr<const SampledStep> last() const { return last_; }

 private:
  bool is_due(size_t window) const { return every_ > 0 && window >= first_ && (window - first_) % every_ == 0; }
  // The step whose parts are noted; null: none.
  SampledStep* open() const { return current_ ? current_.get() : ended_.get(); }
  void note(const Moment& moment, bool is_here);

  size_t every_ = 0;
  size_t first_ = 0;
  std::shared_ptr<SampledStep> current_;
  std::shared_ptr<SampledStep> ended_;  // its window has ended, and the next one has not begun
  std::shared_ptr<SampledStep> last_;
};

}  // namespace fastddp
