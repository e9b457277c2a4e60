#include "reducer/timeline.h"

#include <utility>

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

}  // namespace

Timeline::Timeline(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                   const c10d::ProcessGroup& group)
    : device_(parameters.front().device()),
      progress_(std::make_shared<Progress>(names, group.getRank(), group.getSize())),
      device_progress_(std::make_shared<DeviceProgress>(progress_)),
      ready_times_(parameters) {}

void Timeline::plan(const std::vector<Bucket>& buckets, std::shared_ptr<const Way> way) {
  way_ = std::move(way);
  const auto before = std::exchange(plan_, {});
  std::vector<uint64_t> bytes;
  devices_.clear();
  for (const auto& bucket : buckets) {
    plan_.push_back(bucket.layout.parameters());
    bytes.push_back(static_cast<size_t>(bucket.layout.numbers()) * c10::elementSize(bucket.layout.format().dtype));
    devices_.push_back(bucket.device());
  }
  if (plan_ != before) sampler_.forget();
  progress_->plan(plan_, bytes);
}

// In a backward, another thread or a checkpoint may run a forward, and an optimizer may step.
bool Timeline::counts(What what) const {
  const auto now = doing();
  const bool in_backward = now >= What::backward && now <= What::closing;
  if (what == What::module || what == What::after_forward) return now == What::forward;
  if (what == What::after_backward) return in_backward;
  return !in_backward || (what != What::optimizer && what != What::after_optimizer);
}

void Timeline::tell(What what, std::optional<size_t> bucket) {
  // Without the reducer's lock.
  if (what == What::sent || what == What::gathered) return device_progress_->happened(Moment::now(what, bucket), device_);
  if (!counts(what)) return;
  if (what == What::opens) {
    if (std::exchange(opened_, progress_->windows()) == progress_->windows()) return;
    step_.begin();
    sampler_.step_begins(device_, *opened_, devices_.size());
  }
  const auto moment = Moment::now(what, bucket);
  progress_->happened(moment);
  device_progress_->happened(moment, is_here(bucket) ? device_ : devices_[*bucket]);
  sampler_.happened(moment, is_here(bucket));
  ready_times_.happened(what);
  if (what == What::reduces) window_.begin();
  if (what == What::ends || what == What::fails) window_.end();
  if (what == What::fails) opened_.reset();
}

// `starts` and `started` say how many collectives each lane has begun.
void Timeline::happened(What what, size_t bucket) {
  if (what == What::starts || what == What::started) {
    Progress::Sequences of_lanes;
    for (size_t lane = 0; lane < of_lanes.size(); ++lane) of_lanes[lane] = sequence_of(way_->lane(lane, device_));
    progress_->begun(sequence_of(way_->all.get()), of_lanes);
  }
  tell(what, bucket);
}

Timeline::Wait::Wait(Timeline& timeline, What doing, size_t bucket)
    : timeline_(timeline),
      doing_(doing),
      bucket_(bucket),
      wait_(*timeline.progress_, doing, bucket),
      before_(waited_for_collectives),
      part_(timeline.sampler_.part()) {
  timeline_.sampler_.happened(Moment::now(doing, bucket), /*is_here=*/true);
}

Timeline::Wait::~Wait() {
  const bool gathers = doing_ == What::gather;
  if (!gathers) timeline_.sampler_.blocked(waited_for_collectives - before_);
  timeline_.sampler_.enters(part_);
  if (gathers) timeline_.happened(What::gathered, bucket_);
}

}  // namespace fastddp
