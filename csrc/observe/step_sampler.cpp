#include "observe/step_sampler.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "device/cuda_driver.h"

namespace fastddp {
namespace {

// The rank's own times. All other parts are waits: for parameters (`gather`) or for other ranks, in joint work before a forward
// and after the last gradient.
constexpr std::array<std::pair<What, const char*>, 6> kOwn{{
    {What::after_optimizer, "outside"},  // in none of the others: data loading, logging, evaluation
    {What::module, "forward"},
    {What::after_forward, "loss"},
    {What::backward, "backward"},  // until the last gradient
    {What::hook, "hook"},          // and its pack
    {What::optimizer, "optimizer"},
}};

// Null: not the rank's own.
const char* own_name(What part) {
  const auto* const own = std::ranges::find(kOwn, part, &std::pair<What, const char*>::first);
  return own == kOwn.end() ? nullptr : own->second;
}

// The part that begins; none: the last one goes on. A forward counts from the moment when the module begins, and only if
// gradients follow.
std::optional<What> part_from(What what, What part) {
  if (what == What::after_backward || what == What::fails) return What::after_optimizer;
  if (what == What::after_forward && part != What::module) return std::nullopt;
  const bool begins_one = own_name(what) != nullptr || what == What::computed || what == What::gather;
  return begins_one ? std::optional(what) : std::nullopt;
}

double ms(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace

double SampledStep::at(What what, size_t bucket) const {
  const auto found = moments_.find({what, bucket});
  return found == moments_.end() ? std::numeric_limits<double>::quiet_NaN() : found->second.seconds_since(begin_) * 1e3;
}

StepTimes SampledStep::times() const {
  const std::lock_guard lock(mutex_);
  StepTimes times{{}, at(What::computed), 0, at(What::closing), at(What::closed), at(What::ends), at(What::opens), 0, 0, {}};
  for (const auto& [what, name] : kOwn) times.own[name] = 0;
  bool is_computed = false;
  for (auto part = parts_.begin(); part != parts_.end(); ++part) {
    const bool is_last = part + 1 == parts_.end();
    const auto taken = (is_last ? times.next : begin(part[1])) - begin(*part);
    is_computed |= part->what == What::computed;
    if (!is_computed) times.blocked += ms(part->waited);
    if (part->what == What::gather) (is_computed || is_last ? times.gather_after : times.gather_before) += taken;
    if (const auto* const name = own_name(part->what)) times.own[name] += taken - ms(part->waited);
  }
  for (auto& [name, time] : times.own) time = std::max(0.0, time);
  for (size_t bucket = 0; bucket < buckets_; ++bucket) {
    times.buckets.push_back({at(What::ready, bucket), at(What::started, bucket), at(What::finished, bucket)});
  }
  return times;
}

// Events that are recorded in a capture belong to the graph, and have no times.
void StepSampler::step_begins(c10::Device device, size_t window, size_t buckets) {
  const bool is_captured = (ended_ || is_due(window)) && is_capturing(device);
  if (ended_ && !is_captured) {
    ended_->note(What::opens);
    last_ = std::move(ended_);
  }
  ended_.reset();
  current_.reset();
  if (is_due(window) && !is_captured) current_ = std::make_shared<SampledStep>(device, window, buckets);
}

// A bucket may be sent without all of its gradients: then it is ready now. If the process group does not tell when a collective
// is done, that is known at the latest when the bucket is finished.
void StepSampler::note(const Moment& moment, bool is_here) {
  constexpr std::array kNoted{What::ready,   What::started, What::finished, What::computed,
                              What::closing, What::closed,  What::ends};
  const auto what = moment.what == What::starts ? What::ready : moment.what;
  const bool is_noted = current_ && is_here && std::ranges::find(kNoted, what) != kNoted.end();
  if (is_noted) current_->note(what, moment.bucket.value_or(0));
  if (what == What::ends && current_) ended_ = std::move(current_);
  if (what == What::fails) current_.reset();
  if (const auto part = part_from(what, this->part())) enters(*part);
}

std::function<void()> StepSampler::when_arrived(size_t bucket, bool is_here) const {
  if (!current_ || !is_here) return nullptr;
  return [step = current_, bucket] { step->note(What::finished, bucket); };
}

void StepSampler::enters(What part) {
  auto* const step = open();
  if (step == nullptr || step->parts_.back().what == part) return;
  if (is_capturing(step->device_)) {
    current_.reset();
    ended_.reset();
    return;
  }
  step->parts_.push_back({DeviceMoment::now(step->device_), part});
}

}  // namespace fastddp
