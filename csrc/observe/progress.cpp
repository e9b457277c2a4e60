#include "observe/progress.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "pages/layout.h"

namespace fastddp {
using namespace page;

namespace {

void put(Number& number, uint64_t value) {
  number.store(static_cast<uint32_t>(value), std::memory_order_relaxed);
}

constexpr size_t kNone = ~uint32_t{0};

// Pages of jobs that are gone make room for a new one.
Header header_of(const std::vector<std::string>& parameters, int rank, int ranks) {
  remove_left_pages();
  static std::atomic<uint32_t> wrappers{0};
  Header header{kMagic, kVersion, wrappers++, Process::current(), rank, ranks, 0, 0, 0, {}};
  header.parameters = static_cast<uint32_t>(parameters.size());
  header.buckets = static_cast<uint32_t>(std::min(parameters.size(), kMostBuckets));
  for (const auto& name : parameters) header.name_bytes += static_cast<uint32_t>(name.size() + 1);
  gethostname(header.host.data(), header.host.size() - 1);
  return header;
}

}  // namespace

Progress::Progress(const std::vector<std::string>& parameters, int rank, int ranks)
    : header_(header_of(parameters, rank, ranks)),
      live_(*new (memory_.data() + Rooms::live) Live{}),
      buckets_(reinterpret_cast<BucketRow*>(memory_.data() + rooms_.buckets)),
      parameters_(reinterpret_cast<ParameterRow*>(memory_.data() + rooms_.parameters)) {
  auto* name = reinterpret_cast<char*>(memory_.data() + rooms_.names);
  for (const auto& parameter : parameters) {
    std::memcpy(name, parameter.c_str(), parameter.size() + 1);
    name += parameter.size() + 1;
  }
  for (auto* number : {&live_.doing_bucket, &live_.last_parameter}) put(*number, kNone);
  for (size_t i = 0; i < parameters.size(); ++i) put(parameters_[i].bucket, kNone);
  happened(Moment::now(What::nothing));
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(memory_.data(), &header_, sizeof(header_));
  if (path().empty()) {
    TORCH_WARN_ONCE("fastddp: no status can be kept in /dev/shm (", memory_.problem(),
                    "), so `fastddp ps` will not show this process, and reports of a step that stands still know less. "
                    "Training is the same. Make room there, or mount it writable (Docker: --shm-size).");
  }
}

void Progress::plan(const std::vector<std::vector<size_t>>& buckets, const std::vector<uint64_t>& bytes) {
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    auto& row = this->row(bucket);
    row.started = 0;
    row.bytes = bytes[bucket];
    for (const auto parameter : buckets[bucket]) put(parameters_[parameter].bucket, bucket);
  }
  put(live_.buckets, buckets.size());
}

void Progress::window(uint32_t state, size_t ended) {
  if (live_.windows != ended) live_.step_ends[ended % kSteps].store(now(), std::memory_order_relaxed);
  put(live_.windows, ended);
  put(live_.state, state);
}

void Progress::happened(const Moment& moment) {
  if (moment.what <= kLastDoing) {
    if (moment.bucket) put(live_.doing_bucket, *moment.bucket);
    return live_.doing.store(packed(moment), std::memory_order_release);
  }
  switch (moment.what) {
    case What::started:
      return started(*moment.bucket, moment.time);
    case What::finished:
      return put(live_.finished, *moment.bucket + 1);
    case What::window:
      put(live_.tick, 0);
      return put(live_.finished, 0);
    case What::fails:
      return happened({What::after_backward, std::nullopt, moment.time});
    default:
      return;
  }
}

void Progress::started(size_t bucket, uint64_t time) {
  put(live_.tick, bucket + 1);
  if (sequence_) live_.sequence.store(*sequence_ + 1, std::memory_order_relaxed);
  auto& row = this->row(bucket);
  row.started = time;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    row.collectives[lane][0].store(before_[lane].value_or(0) + 1, std::memory_order_relaxed);
    row.collectives[lane][1].store(begun_[lane].value_or(0), std::memory_order_relaxed);
  }
}

void Progress::gradient(size_t parameter) {
  put(parameters_[parameter].window, window());
  put(live_.last_parameter, parameter);
  live_.gradients.store(live_.gradients.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void Progress::fails_for_others() {
  put(live_.failed_window, window());
}

void Progress::process_ends(const std::string& error, bool stays) {
  if (header_.process.pid != getpid()) return;
  if (live_.ends == 0) std::strncpy(live_.error.data(), error.c_str(), live_.error.size() - 1);
  if (stays) memory_.stay();
  live_.ends.store(1, std::memory_order_release);
}

void Progress::device_waits(const std::optional<DeviceWait>& wait) {
  const auto number = wait ? packed(*wait) : 0;
  if (live_.device_wait.exchange(number) != number) live_.device_since = now();
}

void Progress::belongs_to(uint64_t job, const std::string& script, uint32_t generation) {
  live_.generation = generation;
  std::strncpy(live_.script.data(), script.c_str(), live_.script.size() - 1);
  live_.job.store(job, std::memory_order_release);
}

double Progress::longest_step() const {
  const auto steps = steps_of(live_);
  return steps.empty() ? 0.0 : std::ranges::max(steps);
}

namespace {
thread_local Progress* waits_here = nullptr;
}

Progress::Wait::Wait(Progress& progress, What doing, size_t bucket)
    : progress_(progress), before_(progress.doing().what), outer_(std::exchange(waits_here, &progress)) {
  progress_.happened(Moment::now(doing, bucket));
}

Progress::Wait::~Wait() {
  progress_.happened(Moment::now(before_));
  waits_here = outer_;
}

Progress::UserCode::UserCode() : progress_(waits_here) {
  if (progress_ != nullptr) put(progress_->live_.runs_user_code, 1);
}

Progress::UserCode::~UserCode() {
  if (progress_ != nullptr) put(progress_->live_.runs_user_code, 0);
}

}  // namespace fastddp
