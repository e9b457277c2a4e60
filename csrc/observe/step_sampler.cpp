#include "observe/step_sampler.h"

#include <limits>

namespace fastddp {
namespace {

double ms_since(const Moment& begin, const std::optional<Moment>& moment) {
  return moment ? moment->seconds_since(begin) * 1e3 : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

void StepSampler::Marks::mark_end(size_t bucket) {
  const std::lock_guard lock(ends);
  if (!buckets[bucket].end) buckets[bucket].end = Moment::now(device);
}

void StepSampler::mark(std::optional<Moment> Marks::* moment) {
  if (current_) (*current_).*moment = Moment::now(current_->device);
}

void StepSampler::step_begins(c10::Device device) {
  if (ended_) {
    ended_->next = Moment::now(device);
    last_ = std::move(ended_);
  }
  current_.reset();
  if (every_ == 0 || steps_++ % every_ != 0) return;
  current_ = std::make_shared<Marks>(device);
}

// Buckets are not known before: they may be rebuilt between the two.
void StepSampler::backward_begins(size_t buckets) {
  if (current_) current_->buckets.resize(buckets);
}

void StepSampler::ready(size_t bucket, c10::Device device) {
  if (!samples(device)) return;
  auto& ready = current_->buckets[bucket].ready;
  if (!ready) ready = Moment::now(current_->device);
}

void StepSampler::started(size_t bucket, c10::Device device) {
  if (samples(device)) current_->buckets[bucket].start = Moment::now(current_->device);
}

std::function<void()> StepSampler::when_arrived(size_t bucket, c10::Device device) const {
  if (!samples(device)) return nullptr;
  return [marks = current_, bucket] { marks->mark_end(bucket); };
}

// Where the process group does not tell when a collective is done, this is when that is known at the latest.
void StepSampler::finished(size_t bucket, c10::Device device) {
  if (samples(device)) current_->mark_end(bucket);
}

void StepSampler::blocked(std::chrono::steady_clock::duration time) {
  if (current_ && !current_->computed) current_->blocked += time;
}

void StepSampler::computed() {
  mark(&Marks::computed);
}

void StepSampler::rest_begins() {
  mark(&Marks::rest_start);
}

void StepSampler::rest_ends() {
  mark(&Marks::rest_end);
}

void StepSampler::window_ends() {
  if (!current_) return;
  mark(&Marks::end);
  ended_ = std::move(current_);
}

std::optional<StepTimes> StepSampler::last() const {
  if (!last_) return std::nullopt;
  const std::lock_guard lock(last_->ends);
  const auto since_begin = [&](const std::optional<Moment>& moment) { return ms_since(last_->begin, moment); };
  StepTimes times{{},
                  since_begin(last_->computed),
                  std::chrono::duration<double, std::milli>(last_->blocked).count(),
                  since_begin(last_->rest_start),
                  since_begin(last_->rest_end),
                  since_begin(last_->end),
                  since_begin(last_->next)};
  for (const auto& bucket : last_->buckets) {
    times.buckets.push_back({since_begin(bucket.ready), since_begin(bucket.start), since_begin(bucket.end)});
  }
  return times;
}

}  // namespace fastddp
