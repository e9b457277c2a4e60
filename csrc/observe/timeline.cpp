#include "observe/timeline.h"

#include <utility>

namespace fastddp {

Timeline::Timeline(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, int rank, int ranks)
    : device_(parameters.front().device()),
      progress_(std::make_shared<Progress>(names, rank, ranks)),
      device_progress_(std::make_shared<DeviceProgress>(progress_)),
      ready_times_(parameters) {}

void Timeline::plan(std::vector<std::vector<size_t>> buckets, const std::vector<uint64_t>& bytes,
                    std::vector<c10::Device> devices, std::function<Begun()> begun) {
  if (buckets != plan_) sampler_.forget();
  plan_ = std::move(buckets);
  devices_ = std::move(devices);
  begun_ = std::move(begun);
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
    const auto [sequence, of_lanes] = begun_();
    progress_->begun(sequence, of_lanes);
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
