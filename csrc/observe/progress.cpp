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

Header header_of(const std::vector<std::string>& parameters, int rank, int ranks) {
  static std::atomic<uint32_t> wrappers{0};
  Header header{kMagic, kVersion, wrappers++, Process::current(), rank, ranks, 0, 0, 0, {}};
  header.parameters = static_cast<uint32_t>(parameters.size());
  header.buckets = static_cast<uint32_t>(std::min(parameters.size(), kMostBuckets));
  for (const auto& name : parameters) header.name_bytes += static_cast<uint32_t>(name.size() + 1);
  gethostname(header.host.data(), header.host.size() - 1);
  return header;
}

}  // namespace

struct Progress::Page {
  explicit Page(const Header& header, const std::vector<std::string>& parameters)
      : rooms(header),
        memory(rooms.bytes),
        live(*new (memory.data() + Rooms::live) Live{}),
        buckets(reinterpret_cast<BucketRow*>(memory.data() + rooms.buckets)),
        parameters(reinterpret_cast<ParameterRow*>(memory.data() + rooms.parameters)),
        capacity(header.buckets),
        pid(header.process.pid),
        rank(header.rank),
        ranks(header.ranks) {
    auto* name = reinterpret_cast<char*>(memory.data() + rooms.names);
    for (const auto& parameter : parameters) {
      std::memcpy(name, parameter.c_str(), parameter.size() + 1);
      name += parameter.size() + 1;
    }
    for (auto* number : {&live.doing_bucket, &live.last_parameter}) put(*number, kNone);
    for (size_t i = 0; i < header.parameters; ++i) put(this->parameters[i].bucket, kNone);
    live.doing = packed(Moment::now(What::nothing));
    std::atomic_thread_fence(std::memory_order_release);
    std::memcpy(memory.data(), &header, sizeof(header));
  }

  BucketRow& row(std::optional<size_t> bucket) { return bucket && *bucket < capacity ? buckets[*bucket] : nobodys; }

  const Rooms rooms;
  SharedPage memory;
  Live& live;
  BucketRow* const buckets;
  ParameterRow* const parameters;
  const size_t capacity;
  const int pid, rank, ranks;
  BucketRow nobodys{};
};

Progress::Progress(const std::vector<std::string>& parameters, int rank, int ranks) {
  remove_left_pages();
  page_ = std::make_unique<Page>(header_of(parameters, rank, ranks), parameters);
  if (path().empty()) {
    TORCH_WARN_ONCE("fastddp: no status can be kept in /dev/shm (", page_->memory.problem(),
                    "), so `fastddp ps` will not show this process, and reports of a step that stands still know less. "
                    "Training is the same. Make room there, or mount it writable (Docker: --shm-size).");
  }
}

Progress::~Progress() = default;

const std::string& Progress::path() const {
  return page_->memory.path();
}

int Progress::rank() const {
  return page_->rank;
}

int Progress::ranks() const {
  return page_->ranks;
}

void Progress::plan(const std::vector<std::vector<size_t>>& buckets, const std::vector<uint64_t>& bytes) {
  const auto count = std::min(buckets.size(), page_->capacity);
  for (size_t bucket = 0; bucket < count; ++bucket) {
    auto& row = page_->buckets[bucket];
    for (auto* moment : {&row.ready, &row.started, &row.arrived}) *moment = 0;
    row.bytes = bytes[bucket];
  }
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    for (const auto parameter : buckets[bucket]) put(page_->parameters[parameter].bucket, bucket);
  }
  put(page_->live.buckets, buckets.size());
}

void Progress::window(uint32_t state, size_t ended) {
  auto& live = page_->live;
  if (window_ != ended + 1) {
    live.step_ends[ended % kSteps].store(now(), std::memory_order_relaxed);
    window_ = static_cast<uint32_t>(ended + 1);
  }
  put(live.windows, ended);
  put(live.state, state);
}

Moment Progress::doing() const {
  return moment_of(page_->live.doing.load(std::memory_order_acquire));
}

void Progress::happened(const Moment& moment) {
  auto& live = page_->live;
  if (moment.what <= kLastDoing) {
    if (moment.bucket) put(live.doing_bucket, *moment.bucket);
    return live.doing.store(packed(moment), std::memory_order_release);
  }
  auto& row = page_->row(moment.bucket);
  switch (moment.what) {
    case What::ready:
      row.ready = moment.time;
      return;
    case What::started:
      put(live.tick, *moment.bucket + 1);
      if (sequence_) live.sequence.store(*sequence_ + 1, std::memory_order_relaxed);
      row.started = moment.time;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        row.collectives[lane][0].store(before_[lane].value_or(0) + 1, std::memory_order_relaxed);
        row.collectives[lane][1].store(begun_[lane].value_or(0), std::memory_order_relaxed);
      }
      return;
    case What::finished:
      row.arrived = moment.time;
      return put(live.finished, *moment.bucket + 1);
    case What::window:
      put(live.tick, 0);
      return put(live.finished, 0);
    case What::fails:
      return happened({What::after_backward, std::nullopt, moment.time});
    default:
      return;
  }
}

void Progress::gradient(size_t parameter) {
  auto& live = page_->live;
  put(page_->parameters[parameter].window, window_);
  put(live.last_parameter, parameter);
  live.gradients.store(live.gradients.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void Progress::fails_for_others() {
  put(page_->live.failed_window, window_);
}

void Progress::process_ends(const std::string& error, bool stays) {
  if (page_->pid != getpid()) return;
  auto& live = page_->live;
  if (live.ends == 0) std::strncpy(live.error.data(), error.c_str(), live.error.size() - 1);
  if (stays) page_->memory.stay();
  live.ends.store(1, std::memory_order_release);
}

void Progress::device_waits(const std::optional<DeviceWait>& wait) {
  auto& live = page_->live;
  const auto number = wait ? packed(*wait) : 0;
  if (live.device_wait.exchange(number) != number) live.device_since = now();
}

void Progress::belongs_to(uint64_t job, const std::string& script) {
  auto& live = page_->live;
  std::strncpy(live.script.data(), script.c_str(), live.script.size() - 1);
  live.job.store(job, std::memory_order_release);
}

Progress::Pulse Progress::pulse() const {
  const auto& live = page_->live;
  const auto [what, bucket, since] = doing();
  return {shown(what), since, live.windows, live.tick, live.finished, live.gradients, unpacked(live.device_wait)};
}

size_t Progress::windows() const {
  return page_->live.windows;
}

double Progress::longest_step() const {
  const auto steps = steps_of(page_->live);
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
  if (progress_ != nullptr) put(progress_->page_->live.runs_user_code, 1);
}

Progress::UserCode::~UserCode() {
  if (progress_ != nullptr) put(progress_->page_->live.runs_user_code, 0);
}

Snapshot Progress::read() const {
  return read_page(page_->memory.data(), page_->rooms.bytes, "this rank's page");
}

}  // namespace fastddp
