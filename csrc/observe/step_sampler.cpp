#include "observe/step_sampler.h"

#include <limits>

#include "device/cuda_driver.h"

namespace fastddp {
namespace {

constexpr std::array<const char*, kPhases> kNames{"waiting", "gather",   "outside", "forward",
                                                  "loss",    "backward", "hook",    "optimizer"};

using Milliseconds = std::chrono::duration<double, std::milli>;

double ms_since(const Moment& begin, const std::optional<Moment>& moment) {
  return moment ? moment->seconds_since(begin) * 1e3 : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

StepTimes SampledStep::times() const {
  const std::lock_guard lock(ends_);
  const auto since_begin = [&](const std::optional<Moment>& moment) { return ms_since(begin_, moment); };
  const auto taken = this->taken();
  const auto gathered = gathered_until(since_begin(computed_));
  StepTimes times{{},
                  since_begin(computed_),
                  Milliseconds(blocked_).count(),
                  since_begin(rest_start_),
                  since_begin(rest_end_),
                  since_begin(end_),
                  since_begin(next_),
                  gathered,
                  taken[static_cast<size_t>(Phase::gather)] - gathered,
                  {}};
  for (auto phase = static_cast<size_t>(Phase::gather) + 1; phase < kPhases; ++phase) {
    times.own[kNames[phase]] = std::max(0.0, taken[phase] - Milliseconds(waited_[phase]).count());
  }
  for (const auto& bucket : buckets_) {
    times.buckets.push_back({since_begin(bucket.ready), since_begin(bucket.start), since_begin(bucket.end)});
  }
  return times;
}

std::array<double, kPhases> SampledStep::taken() const {
  std::array<double, kPhases> taken{};
  for (size_t i = 0; i < phases_.size(); ++i) {
    const auto end = i + 1 < phases_.size() ? std::optional(phases_[i + 1].at) : next_;
    taken[static_cast<size_t>(phases_[i].phase)] += ms_since(phases_[i].at, end);
  }
  return taken;
}

// `moment`: in ms since the step's begin.
double SampledStep::gathered_until(double moment) const {
  double gathered = 0;
  for (size_t i = 0; i + 1 < phases_.size(); ++i) {
    const bool counts = phases_[i].phase == Phase::gather && ms_since(begin_, phases_[i].at) < moment;
    if (counts) gathered += ms_since(phases_[i].at, phases_[i + 1].at);
  }
  return gathered;
}

// Events that are recorded in a capture belong to the graph, and have no times.
void StepSampler::step_begins(c10::Device device, size_t window) {
  const bool is_captured = (ended_ || is_due(window)) && is_capturing(device);
  if (ended_ && !is_captured) {
    ended_->next_ = Moment::now(device);
    last_ = std::move(ended_);
  }
  ended_.reset();
  current_.reset();
  if (is_due(window) && !is_captured) current_ = std::make_shared<SampledStep>(device, window);
}

// The number of buckets is not known earlier: they may be rebuilt between step_begins() and this.
void StepSampler::backward_begins(size_t buckets) {
  if (current_) current_->buckets_.resize(buckets);
}

void StepSampler::ready(size_t bucket, c10::Device device) {
  if (!samples(device)) return;
  auto& ready = current_->buckets_[bucket].ready;
  if (!ready) ready = Moment::now(device);
}

void StepSampler::started(size_t bucket, c10::Device device) {
  if (samples(device)) current_->buckets_[bucket].start = Moment::now(device);
}

std::function<void()> StepSampler::when_arrived(size_t bucket, c10::Device device) const {
  if (!samples(device)) return nullptr;
  return [step = current_, bucket] { step->mark_end(bucket); };
}

// If the process group does not tell when a collective is done, it is known here at the latest.
void StepSampler::finished(size_t bucket, c10::Device device) {
  if (samples(device)) current_->mark_end(bucket);
}

void StepSampler::enters(Phase phase) {
  auto* const step = open();
  if (step == nullptr || step->phases_.back().phase == phase) return;
  if (is_capturing(step->device_)) {
    current_.reset();
    ended_.reset();
    return;
  }
  step->phases_.push_back({Moment::now(step->device_), phase});
}

// A forward counts from the moment when the module begins, and only if gradients follow. Waits count apart.
void StepSampler::follows(Doing doing) {
  switch (doing) {
    case Doing::after_forward:
      if (phase() == Phase::forward) enters(Phase::loss);
      return;
    case Doing::backward:
      return enters(Phase::backward);
    case Doing::optimizer:
      return enters(Phase::optimizer);
    case Doing::after_backward:
    case Doing::after_optimizer:
      return enters(Phase::outside);
    default:
      return;
  }
}

}  // namespace fastddp
