// Everything that looks on while a reducer works: profilers, the sampler, ready times, the clock of waits. The reducer tells
// what happens; who listens to it is decided here.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "bucket/bucket.h"
#include "observe/ranges.h"
#include "observe/ready_times.h"
#include "observe/step_sampler.h"
#include "observe/wait_clock.h"
#include "pipeline/exchange.h"

namespace fastddp {

// A *step* lasts from a window's first forward to the next one's. Where nobody listens each function costs a test or two.
class Observer {
 public:
  explicit Observer(const std::vector<at::Tensor>& parameters);

  void buckets_change();

  void forward_begins();
  // The first gradient of a backward that synchronises.
  void reduction_begins(size_t buckets);
  // Another window over the same forward begins.
  void another_window_begins();
  void gradient_ready(size_t parameter);
  void bucket_complete(const Bucket& bucket);

  // Around a bucket's first collective, and behind its last one: `exchange` tells when that is done.
  void bucket_starts(const Bucket& bucket);
  void bucket_started(const Bucket& bucket);
  void bucket_fully_started(const Bucket& bucket, Exchange& exchange);
  void bucket_finished(const Bucket& bucket);

  // The gradients of this rank are there.
  void gradients_computed();
  // Behind all buckets: status, sparse gradients, late ones.
  void closing_begins();
  void closing_ends();
  void window_finished();
  void window_failed();
  // Others had one, without this rank.
  void window_passed();

  // While it lives, the calling thread may wait for other ranks. `complete`: buckets whose gradients are all there.
  class Waits {
   public:
    Waits(Observer& observer, size_t window, size_t complete);
    ~Waits();
    Waits(const Waits&) = delete;
    Waits& operator=(const Waits&) = delete;

   private:
    Observer& observer_;
    const WaitClock::Wait wait_;
    const std::chrono::steady_clock::duration before_;
  };

  // It may outlive this object.
  std::shared_ptr<const WaitClock> wait_clock() const { return wait_clock_; }
  StepSampler& sampler() { return sampler_; }
  ReadyTimes& ready_times() { return ready_times_; }

 private:
  void step_ends();

  const c10::Device device_;  // of the first parameter
  const std::shared_ptr<WaitClock> wait_clock_ = std::make_shared<WaitClock>();
  StepSampler sampler_;
  ReadyTimes ready_times_;
  Span step_{"step"};
  bool step_is_open_ = false;  // a forward of the window that comes, or has come, has been
  Span window_{"window"};      // from the first gradient that is synchronised to the end of its backward
};

}  // namespace fastddp
