// What happens in a reducer, told once to all who observe it: the page of progress, devices' progress, the sampler of steps,
// ready times, profilers.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucket/bucket.h"
#include "observe/device_progress.h"
#include "observe/progress.h"
#include "observe/ranges.h"
#include "observe/ready_times.h"
#include "observe/step_sampler.h"
#include "trip/driver.h"
#include "window/window.h"

namespace fastddp {

// If nobody listens, a call costs a few stores and tests.
class Timeline : public Moments {
 public:
  Timeline(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, const c10d::ProcessGroup& group);

  // These are the buckets now, and how they travel. Other buckets than before end the sampled step.
  void plan(const std::vector<Bucket>& buckets, std::shared_ptr<const Way> way);
  void window(const Window& window) { progress_->window(static_cast<uint32_t>(window.state()), window.ended()); }

  void gradient(size_t parameter) {
    ready_times_.gradient(parameter);
    progress_->gradient(parameter);
  }
  void happened(What what) { tell(what, std::nullopt); }
  void happened(What what, size_t bucket) override;
  std::function<void()> when_arrived(size_t bucket) const override { return sampler_.when_arrived(bucket, is_here(bucket)); }
  // What the thread that trains is doing, in the words of others.
  What doing() const { return shown(progress_->doing().what); }

  // While it lives, the calling thread may wait for other ranks, for what it is `doing` with a bucket or a tick: `tick`, or
  // `hook` if the tick runs a user's code. In a `gather` its stream may wait, too.
  class Wait {
   public:
    Wait(Timeline& timeline, What doing, size_t bucket);
    ~Wait();
    C10_DISABLE_COPY_AND_ASSIGN(Wait);

   private:
    Timeline& timeline_;
    const What doing_;
    const size_t bucket_;
    const Progress::Wait wait_;
    const std::chrono::steady_clock::duration before_;
    const What part_;
  };

  // The result may outlive this object.
  std::shared_ptr<Progress> progress() const { return progress_; }
  std::shared_ptr<DeviceProgress> device_progress() const { return device_progress_; }
  StepSampler& sampler() { return sampler_; }
  ReadyTimes& ready_times() { return ready_times_; }

 private:
  void tell(What what, std::optional<size_t> bucket);
  bool counts(What what) const;
  bool is_here(std::optional<size_t> bucket) const { return !bucket || devices_[*bucket] == device_; }

  const c10::Device device_;  // of the first parameter
  const std::shared_ptr<Progress> progress_;
  const std::shared_ptr<DeviceProgress> device_progress_;
  StepSampler sampler_;
  ReadyTimes ready_times_;
  std::shared_ptr<const Way> way_;
  std::vector<std::vector<size_t>> plan_;
  std::vector<c10::Device> devices_;  // by bucket
  LongRange step_{"step"};
  std::optional<size_t> opened_;  // how many windows had ended when the last step began; none: it has failed
  LongRange window_{"window"};    // from the first gradient that is synchronised to the end of its backward
};

}  // namespace fastddp
