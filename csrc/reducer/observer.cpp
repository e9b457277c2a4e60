#include "reducer/observer.h"

#include "bucket/bucket_range.h"
#include "transport/works.h"

namespace fastddp {

Observer::Observer(const std::vector<at::Tensor>& parameters)
    : device_(parameters.front().device()), ready_times_(parameters) {}

void Observer::buckets_change() {
  sampler_.forget();
}

void Observer::forward_begins() {
  if (step_is_open_) return;
  step_is_open_ = true;
  step_.begin();
  sampler_.step_begins(device_);
  ready_times_.begin_window();
}

void Observer::reduction_begins(size_t buckets) {
  window_.begin();
  sampler_.backward_begins(buckets);
}

void Observer::another_window_begins() {
  ready_times_.begin_window();
}

void Observer::gradient_ready(size_t parameter) {
  ready_times_.note(parameter);
}

void Observer::bucket_complete(const Bucket& bucket) {
  const BucketRange moment("ready", bucket);
  sampler_.ready(bucket.index, bucket.device());
}

// A bucket may be sent without all of its gradients, and then this is when it is ready.
void Observer::bucket_starts(const Bucket& bucket) {
  sampler_.ready(bucket.index, bucket.device());
}

void Observer::bucket_started(const Bucket& bucket) {
  sampler_.started(bucket.index, bucket.device());
}

void Observer::bucket_fully_started(const Bucket& bucket, Exchange& exchange) {
  if (const auto call = sampler_.when_arrived(bucket.index, bucket.device())) exchange.when_arrived(bucket, call);
}

void Observer::bucket_finished(const Bucket& bucket) {
  sampler_.finished(bucket.index, bucket.device());
}

void Observer::gradients_computed() {
  sampler_.computed();
}

void Observer::closing_begins() {
  sampler_.rest_begins();
}

void Observer::closing_ends() {
  sampler_.rest_ends();
}

void Observer::window_finished() {
  ready_times_.end_window();
  step_ends();
  sampler_.window_ends();
}

void Observer::window_failed() {
  step_ends();
  sampler_.window_failed();
}

void Observer::window_passed() {
  step_is_open_ = false;
}

void Observer::step_ends() {
  step_is_open_ = false;
  window_.end();
}

Observer::Waits::Waits(Observer& observer, size_t window, size_t complete)
    : observer_(observer), wait_(*observer.wait_clock_, window, complete), before_(waited_for_collectives) {}

Observer::Waits::~Waits() {
  observer_.sampler_.blocked(waited_for_collectives - before_);
}

}  // namespace fastddp
