// Everything that observes a reducer: profilers, the sampler, ready times, the page of progress. The reducer says what happens;
// this class decides who listens.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "bucket/bucket.h"
#include "observe/device_progress.h"
#include "observe/progress.h"
#include "observe/ranges.h"
#include "observe/ready_times.h"
#include "observe/step_sampler.h"
#include "pipeline/exchange.h"
#include "window/window.h"

namespace fastddp {

// A *step* lasts from a window's first forward to that of the next window. If nobody listens, a function costs a test or two.
class Observer {
 public:
  Observer(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, const c10d::ProcessGroup& group);

  void buckets_change() { sampler_.forget(); }
  void buckets_are(const std::vector<Bucket>& buckets);

  void window_is(const Window& window) { progress_->window(static_cast<uint32_t>(window.state()), window.ended()); }
  void window_begins() { progress_->window_begins(); }
  // Any forward begins; then, if it has gradients, forward_begins().
  void module_runs() { enters(Doing::forward); }
  // `window`: the number of the open window, or of the next one.
  void forward_begins(size_t window);
  // The module itself begins: what ranks do together before a forward is over.
  void module_begins();
  void forward_ends() {
    if (progress_->doing() == Doing::forward) enters(Doing::after_forward);
  }
  void backward_begins() { enters(Doing::backward); }
  // Returns whether it is the first one of a backward, whose end shall be reported.
  bool local_gradient();
  void local_backward_ends() {
    if (progress_->doing() == Doing::backward) enters(Doing::after_backward);
  }
  void optimizer_steps(bool begins);
  // The first gradient of a backward that synchronises.
  void reduction_begins(size_t buckets) {
    window_.begin();
    sampler_.backward_begins(buckets);
  }
  // Another window over the same forward begins.
  void another_window_begins() { ready_times_.begin_window(); }
  void gradient_ready(size_t parameter) {
    ready_times_.note(parameter);
    progress_->gradient(parameter);
  }
  void bucket_complete(const Bucket& bucket);

  // Before and after a bucket's first collective starts, and after its last one has: `exchange` tells when that is done.
  void bucket_starts(const Bucket& bucket, const Exchange& exchange);
  void bucket_started(const Bucket& bucket, const Exchange& exchange);
  void bucket_fully_started(const Bucket& bucket, Exchange& exchange);
  // The calling thread may now wait for the bucket.
  void bucket_awaited(const Bucket& bucket) { progress_->doing(Doing::finish, bucket.index()); }
  void bucket_finished(const Bucket& bucket) {
    sampler_.finished(bucket.index(), bucket.device());
    progress_->bucket_arrived(bucket.index());
    device_progress_->arrived(bucket.index(), bucket.device());
  }

  // All gradients of this rank have come.
  void gradients_computed() { sampler_.computed(); }
  // After all buckets: status, sparse gradients, late gradients.
  void closing_begins() {
    progress_->doing(Doing::closing);
    sampler_.rest_begins();
  }
  void closing_ends() { sampler_.rest_ends(); }
  void window_finished() {
    ready_times_.end_window();
    step_ends();
    sampler_.window_ends();
  }
  void window_failed();
  // Other ranks had a window without this one.
  void window_passed() { step_is_open_ = false; }

  // A bucket's parameters are on their way, and could not be waited for.
  void parameters_sent(size_t bucket) { device_progress_->started(bucket, device_, /*of_parameters=*/true); }
  void parameters_failed() { progress_->fails_for_others(); }

  // While it lives, the calling thread or its stream may wait for parameters of a bucket.
  class Gathers {
   public:
    Gathers(Observer& observer, size_t bucket);
    ~Gathers();
    C10_DISABLE_COPY_AND_ASSIGN(Gathers);

   private:
    Observer& observer_;
    const Range range_;
    const size_t bucket_;
    const Progress::Wait wait_;
    const Phase phase_;
  };

  // While it lives, the calling thread may wait for other ranks or, if it `runs_hook`, be in a user's communication hook.
  class Waits {
   public:
    Waits(Observer& observer, size_t tick, bool runs_hook = false);
    ~Waits();
    C10_DISABLE_COPY_AND_ASSIGN(Waits);

   private:
    Observer& observer_;
    const Progress::Wait wait_;
    const std::chrono::steady_clock::duration before_;
    const Phase phase_;
  };

  // When it goes, the backward has ended.
  class Backward {
   public:
    explicit Backward(Observer& observer) : observer_(observer) {}
    ~Backward();
    C10_DISABLE_COPY_AND_ASSIGN(Backward);

   private:
    Observer& observer_;
  };

  // The result may outlive this object.
  std::shared_ptr<const Progress> progress() const { return progress_; }
  std::shared_ptr<DeviceProgress> device_progress() const { return device_progress_; }
  StepSampler& sampler() { return sampler_; }
  ReadyTimes& ready_times() { return ready_times_; }

 private:
  void enters(Doing doing) {
    progress_->doing(doing);
    sampler_.follows(doing);
  }
  void step_ends();

  const c10::Device device_;  // of the first parameter
  const std::shared_ptr<Progress> progress_;
  const std::shared_ptr<DeviceProgress> device_progress_;
  StepSampler sampler_;
  ReadyTimes ready_times_;
  LongRange step_{"step"};
  bool step_is_open_ = false;   // the open window, or the next one, has had a forward
  LongRange window_{"window"};  // from the first gradient that is synchronised to the end of its backward
};

}  // namespace fastddp
