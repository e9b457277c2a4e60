// What happens in a reducer, told once to all who observe it: the page of progress, devices' progress, the sampler of steps,
// ready times, profilers.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "observe/device_progress.h"
#include "observe/progress.h"
#include "observe/ranges.h"
#include "observe/ready_times.h"
#include "observe/step_sampler.h"

namespace fastddp {

// If nobody listens, a call costs a few stores and tests.
class Timeline {
 public:
  Timeline(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, int rank, int ranks);

  // The buckets now: their parameters, bytes and devices. Other buckets than before end the sampled step. `begun` tells how many
  // collectives have begun, of the process group and of each lane.
  using Begun = std::pair<std::optional<uint64_t>, Progress::Sequences>;
  void plan(std::vector<std::vector<size_t>> buckets, const std::vector<uint64_t>& bytes, std::vector<c10::Device> devices,
            std::function<Begun()> begun);
  void window(uint32_t state, size_t ended) { progress_->window(state, ended); }

  void gradient(size_t parameter) {
    ready_times_.gradient(parameter);
    progress_->gradient(parameter);
  }
  void happened(What what) { tell(what, std::nullopt); }
  void happened(What what, size_t bucket);
  // Returns what to call, from any thread, when a bucket's last collective, which has started, is done; null: nothing.
  std::function<void()> when_arrived(size_t bucket) const { return sampler_.when_arrived(bucket, is_here(bucket)); }
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
  std::function<Begun()> begun_;
  std::vector<std::vector<size_t>> plan_;
  std::vector<c10::Device> devices_;  // by bucket
  LongRange step_{"step"};
  std::optional<size_t> opened_;  // how many windows had ended when the last step began; none: it has failed
  LongRange window_{"window"};    // from the first gradient that is synchronised to the end of its backward
};

}  // namespace fastddp
