#include "observe/progress.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

#include "observe/progress_page.h"

namespace fastddp {
using namespace page;

namespace {

uint64_t now() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

double seconds_since(uint64_t moment) {
  const auto at = now();
  return moment < at ? static_cast<double>(at - moment) * 1e-9 : 0.0;
}

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

std::vector<std::string> names_in(const char* text, size_t bytes) {
  std::vector<std::string> names;
  for (const auto* const end = text + bytes; text < end; text += names.back().size() + 1) {
    names.emplace_back(text, strnlen(text, static_cast<size_t>(end - text)));
  }
  return names;
}

uint64_t end_of(const Live& live, size_t step) {
  return live.step_ends[step % kSteps].load(std::memory_order_relaxed);
}

// Seconds from the end of each step to the end of the next.
std::vector<double> steps_of(const Live& live) {
  std::vector<double> steps;
  const size_t last = live.windows;
  for (auto step = last < kSteps ? 1 : last - kSteps + 1; step < last; ++step) {
    const auto begin = end_of(live, step), end = end_of(live, step + 1);
    if (begin < end && begin > 0) steps.push_back(static_cast<double>(end - begin) * 1e-9);
  }
  return steps;
}

std::vector<Snapshot::Collectives> collectives_of(const BucketRow& row) {
  std::vector<Snapshot::Collectives> all;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const uint64_t first = row.collectives[lane][0], last = row.collectives[lane][1];
    if (first <= last) all.push_back({lane, first, last});
  }
  return all;
}

std::optional<size_t> number_below(const Number& number, size_t end) {
  const auto value = number.load(std::memory_order_relaxed);
  return value < end ? std::optional<size_t>(value) : std::nullopt;
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
    live.doing = since(Doing::nothing, now());
    std::atomic_thread_fence(std::memory_order_release);
    std::memcpy(memory.data(), &header, sizeof(header));
  }

  const Rooms rooms;
  SharedPage memory;
  Live& live;
  BucketRow* const buckets;
  ParameterRow* const parameters;
  const size_t capacity;
  const int pid, rank, ranks;
};

const char* to_string(Doing doing) {
  constexpr std::array names{"nothing", "forward", "after_forward",  "backward",  "tick",
                             "finish",  "closing", "after_backward", "optimizer", "after_optimizer"};
  return names.at(static_cast<size_t>(doing));
}

Progress::Progress(const std::vector<std::string>& parameters, int rank, int ranks) {
  remove_left_pages();
  page_ = std::make_unique<Page>(header_of(parameters, rank, ranks), parameters);
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

void Progress::window_begins() {
  put(page_->live.tick, 0);
  put(page_->live.finished, 0);
}

Doing Progress::doing() const {
  return doing_of(page_->live.doing.load(std::memory_order_relaxed));
}

void Progress::doing(Doing doing) {
  page_->live.doing.store(since(doing, now()), std::memory_order_release);
}

void Progress::doing(Doing doing, size_t bucket) {
  put(page_->live.doing_bucket, bucket);
  this->doing(doing);
}

void Progress::gradient(size_t parameter) {
  auto& live = page_->live;
  put(page_->parameters[parameter].window, window_);
  put(live.last_parameter, parameter);
  live.gradients.store(live.gradients.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void Progress::bucket_ready(size_t bucket) {
  if (bucket < page_->capacity) page_->buckets[bucket].ready = now();
}

void Progress::bucket_starts(const Sequences& sequences) {
  before_ = sequences;
}

void Progress::bucket_started(size_t bucket, std::optional<uint64_t> sequence, const Sequences& sequences) {
  auto& live = page_->live;
  put(live.tick, bucket + 1);
  if (sequence) live.sequence.store(*sequence + 1, std::memory_order_relaxed);
  if (bucket >= page_->capacity) return;
  auto& row = page_->buckets[bucket];
  row.started = now();
  for (size_t lane = 0; lane < kLanes; ++lane) {
    row.collectives[lane][0].store(before_[lane].value_or(0) + 1, std::memory_order_relaxed);
    row.collectives[lane][1].store(sequences[lane].value_or(0), std::memory_order_relaxed);
  }
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

void Progress::bucket_arrived(size_t bucket) {
  if (bucket < page_->capacity) page_->buckets[bucket].arrived = now();
  put(page_->live.finished, bucket + 1);
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
  const auto since = live.doing.load(std::memory_order_acquire);
  return {doing_of(since), moment_of(since),          live.windows, live.tick, live.finished,
          live.gradients,  unpacked(live.device_wait)};
}

double Progress::longest_step() const {
  const auto steps = steps_of(page_->live);
  return steps.empty() ? 0.0 : std::ranges::max(steps);
}

namespace {
thread_local Progress* waits_here = nullptr;
}

Progress::Wait::Wait(Progress& progress, Doing doing, size_t bucket)
    : progress_(progress), before_(progress.doing()), outer_(std::exchange(waits_here, &progress)) {
  progress_.doing(doing, bucket);
}

Progress::Wait::~Wait() {
  progress_.doing(before_);
  waits_here = outer_;
}

Progress::UserCode::UserCode() : progress_(waits_here) {
  if (progress_ != nullptr) put(progress_->page_->live.runs_user_code, 1);
}

Progress::UserCode::~UserCode() {
  if (progress_ != nullptr) put(progress_->page_->live.runs_user_code, 0);
}

namespace {

Snapshot snapshot_of(const std::byte* data, size_t bytes, const std::string& path) {
  const auto check = [&](bool holds, const char* what) {
    TORCH_CHECK(holds, "fastddp: ", path, " cannot be read: ", what);
  };
  check(bytes >= sizeof(Header), "it is too short for a page of a rank");
  Header header;
  std::memcpy(&header, data, sizeof(header));
  check(header.magic == kMagic, "it is no page of a rank, or one that is being made");
  TORCH_CHECK(header.version == kVersion, "fastddp: ", path,
              " was written by another version of fastddp (pages of version ", header.version,
              ", these are of version ", kVersion, "): read it with that one");
  const Rooms rooms(header);
  check(bytes >= rooms.bytes, "it is shorter than it says");

  Snapshot snapshot{};
  snapshot.process = header.process;
  header.host.back() = 0;
  snapshot.host = header.host.data();
  snapshot.number = header.number;
  snapshot.rank = header.rank;
  snapshot.ranks = header.ranks;
  snapshot.names = names_in(reinterpret_cast<const char*>(data + rooms.names), header.name_bytes);

  const auto& live = *reinterpret_cast<const Live*>(data + Rooms::live);
  snapshot.job = live.job.load(std::memory_order_acquire);
  if (snapshot.job != 0) snapshot.script.assign(live.script.data(), strnlen(live.script.data(), live.script.size()));
  const auto since = live.doing.load(std::memory_order_acquire);
  check(doing_of(since) <= Doing::after_optimizer, "what it says makes no sense");
  snapshot.doing = doing_of(since);
  snapshot.seconds = seconds_since(moment_of(since));
  snapshot.state = live.state;
  snapshot.windows = live.windows;
  const size_t buckets = std::min(live.buckets.load(), header.buckets);
  snapshot.bucket = number_below(live.doing_bucket, live.buckets);
  snapshot.tick = live.tick;
  snapshot.finished = live.finished;
  snapshot.gradients = live.gradients;
  snapshot.last_parameter = number_below(live.last_parameter, snapshot.names.size());
  if (const auto sequence = live.sequence.load(); sequence > 0) snapshot.sequence = sequence - 1;
  snapshot.runs_user_code = live.runs_user_code != 0;
  snapshot.device_wait = unpacked(live.device_wait);
  snapshot.device_seconds = seconds_since(live.device_since);
  snapshot.fails_for_others = live.failed_window == snapshot.windows + 1;
  snapshot.process_ends = live.ends.load(std::memory_order_acquire) != 0;
  if (snapshot.process_ends) snapshot.error.assign(live.error.data(), strnlen(live.error.data(), live.error.size()));

  const auto window_begin = snapshot.windows > 0 ? end_of(live, snapshot.windows) : 0;
  const auto* const rows = reinterpret_cast<const BucketRow*>(data + rooms.buckets);
  const auto ago = [&](const Moment64& moment) {
    return moment > window_begin ? std::optional(seconds_since(moment)) : std::nullopt;
  };
  for (size_t i = 0; i < buckets; ++i) {
    const auto started = ago(rows[i].started);
    auto collectives = started ? collectives_of(rows[i]) : std::vector<Snapshot::Collectives>{};
    snapshot.buckets.push_back(
        {ago(rows[i].ready), started, ago(rows[i].arrived), rows[i].bytes, std::move(collectives), {}});
  }
  const auto* const parameters = reinterpret_cast<const ParameterRow*>(data + rooms.parameters);
  for (size_t i = 0; i < header.parameters; ++i) {
    snapshot.came.push_back(parameters[i].window == snapshot.windows + 1);
    if (const auto bucket = number_below(parameters[i].bucket, buckets)) snapshot.buckets[*bucket].members.push_back(i);
  }
  snapshot.step_seconds = steps_of(live);
  return snapshot;
}

}  // namespace

Snapshot Progress::read() const {
  return snapshot_of(page_->memory.data(), page_->rooms.bytes, "this rank's page");
}

Snapshot Progress::read(const std::string& path) {
  const PageCopy copy(path);
  return snapshot_of(copy.data(), copy.size(), path);
}

void remove_left_pages() {
  for (const auto& path : shared_pages()) {
    if (has_process(path)) continue;  // pages of those that run are not read
    try {
      const auto process = Progress::read(path).process;
      if (life_of(process) == Life::gone && left_for(path, std::chrono::hours(1))) remove_page(path);
    } catch (const c10::Error&) {  // another version's, or one that is being made
    }
  }
}

std::vector<size_t> Snapshot::missing(size_t bucket) const {
  std::vector<size_t> missing;
  if (bucket >= buckets.size()) return missing;
  std::ranges::copy_if(buckets[bucket].members, std::back_inserter(missing), [&](size_t i) { return !came[i]; });
  return missing;
}

std::vector<size_t> Snapshot::missing() const {
  std::vector<size_t> missing;
  for (size_t i = 0; i < came.size(); ++i) {
    if (!came[i]) missing.push_back(i);
  }
  return missing;
}

}  // namespace fastddp
