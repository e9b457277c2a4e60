#include "reducer/observer.h"

#include "bucket/bucket_range.h"
#include "transport/works.h"

namespace fastddp {

namespace {

// How many collectives the group has begun, where its backend counts them.
std::optional<uint64_t> sequence_of(c10d::ProcessGroup* group) {
  using Type = c10d::ProcessGroup::BackendType;
  if (group == nullptr) return std::nullopt;
  const auto type = group->getBackendType();
  if (type != Type::GLOO && type != Type::NCCL) return std::nullopt;
  return group->getSequenceNumberForGroup();
}

Progress::Sequences sequences_of(const Exchange& exchange) {
  Progress::Sequences sequences;
  for (size_t lane = 0; lane < sequences.size(); ++lane) sequences[lane] = sequence_of(exchange.lane(lane));
  return sequences;
}

// Then another thread is in backward, or a checkpoint runs its forward, or an optimizer steps inside backward.
bool is_in_backward(Doing doing) {
  return doing == Doing::backward || doing == Doing::tick || doing == Doing::finish || doing == Doing::closing;
}

}  // namespace

Observer::Observer(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                   const c10d::ProcessGroup& group)
    : device_(parameters.front().device()),
      progress_(std::make_shared<Progress>(names, group.getRank(), group.getSize())),
      device_progress_(std::make_shared<DeviceProgress>(progress_)),
      ready_times_(parameters) {}

void Observer::buckets_are(const std::vector<Bucket>& buckets) {
  std::vector<std::vector<size_t>> plan;
  std::vector<uint64_t> bytes;
  for (const auto& bucket : buckets) {
    plan.push_back(bucket.layout.parameters());
    bytes.push_back(static_cast<size_t>(bucket.layout.numbers()) * c10::elementSize(bucket.layout.format().dtype));
  }
  progress_->plan(plan, bytes);
}

void Observer::module_begins() {
  if (!is_in_backward(progress_->doing())) sampler_.enters(Phase::forward);
}

// Nobody reports when such a backward begins, so its first gradient counts.
bool Observer::local_gradient() {
  if (progress_->doing() == Doing::backward) return false;
  enters(Doing::backward);
  return true;
}

void Observer::optimizer_steps(bool begins) {
  if (is_in_backward(progress_->doing())) return;
  enters(begins ? Doing::optimizer : Doing::after_optimizer);
}

void Observer::forward_begins(size_t window) {
  if (step_is_open_) return;
  step_is_open_ = true;
  step_.begin();
  sampler_.step_begins(device_, window);
  ready_times_.begin_window();
}

void Observer::bucket_complete(const Bucket& bucket) {
  const BucketRange moment("ready", bucket);
  sampler_.ready(bucket.index(), bucket.device());
  progress_->bucket_ready(bucket.index());
}

// A bucket may be sent without all of its gradients: then it is ready now.
void Observer::bucket_starts(const Bucket& bucket, const Exchange& exchange) {
  sampler_.ready(bucket.index(), bucket.device());
  progress_->bucket_starts(sequences_of(exchange));
}

void Observer::bucket_started(const Bucket& bucket, const Exchange& exchange) {
  sampler_.started(bucket.index(), bucket.device());
  progress_->bucket_started(bucket.index(), sequence_of(exchange.group()), sequences_of(exchange));
  device_progress_->started(bucket.index(), bucket.device());
}

void Observer::bucket_fully_started(const Bucket& bucket, Exchange& exchange) {
  if (const auto call = sampler_.when_arrived(bucket.index(), bucket.device())) exchange.when_arrived(bucket, call);
}

void Observer::window_failed() {
  step_ends();
  sampler_.window_failed();
  device_progress_->forget();
  progress_->doing(Doing::after_backward);
}

void Observer::step_ends() {
  step_is_open_ = false;
  window_.end();
}

Observer::Gathers::Gathers(Observer& observer, size_t bucket)
    : observer_(observer),
      range_("await", [&] { return " bucket=" + std::to_string(bucket); }),
      bucket_(bucket),
      wait_(*observer.progress_, Doing::gather, bucket),
      phase_(observer.sampler_.phase()) {
  observer_.sampler_.enters(Phase::gather);
}

Observer::Gathers::~Gathers() {
  observer_.sampler_.enters(phase_);
  observer_.device_progress_->arrived(bucket_, observer_.device_, /*of_parameters=*/true);
}

Observer::Waits::Waits(Observer& observer, size_t tick, bool runs_hook)
    : observer_(observer),
      wait_(*observer.progress_, Doing::tick, tick),
      before_(waited_for_collectives),
      phase_(observer.sampler_.phase()) {
  if (runs_hook) observer_.sampler_.enters(Phase::hook);
}

Observer::Waits::~Waits() {
  observer_.sampler_.blocked(waited_for_collectives - before_);
  observer_.sampler_.enters(phase_);
}

Observer::Backward::~Backward() {
  observer_.enters(Doing::after_backward);
}

}  // namespace fastddp
