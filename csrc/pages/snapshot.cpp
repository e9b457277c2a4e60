#include "pages/snapshot.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pages/layout.h"

namespace fastddp {
using namespace page;

namespace {

double seconds_since(uint64_t moment) {
  const auto at = now();
  return moment < at ? static_cast<double>(at - moment) * 1e-9 : 0.0;
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

Pulse page::pulse_of(const Live& live) {
  const auto last = moment_of(live.doing.load(std::memory_order_acquire));
  return {shown(last.what), last.time, live.windows, live.tick, live.finished, live.gradients, unpacked(live.device_wait)};
}

// Seconds from the end of each step to the end of the next.
std::vector<double> page::steps_of(const Live& live) {
  std::vector<double> steps;
  const size_t last = live.windows;
  for (auto step = last < kSteps ? 1 : last - kSteps + 1; step < last; ++step) {
    const auto begin = end_of(live, step), end = end_of(live, step + 1);
    if (begin < end && begin > 0) steps.push_back(static_cast<double>(end - begin) * 1e-9);
  }
  return steps;
}

const char* to_string(What doing) {
  constexpr std::array names{"nothing",        "forward",   "after_forward", "backward",        "tick", "finish", "closing",
                             "after_backward", "optimizer", "gather",        "after_optimizer", "agree"};
  return names.at(static_cast<size_t>(doing));
}

Moment Moment::now(What what, std::optional<size_t> bucket) {
  return {what, bucket, page::now()};
}

Snapshot read_page(const std::byte* data, size_t bytes, const std::string& path) {
  const auto check = [&](bool holds, const char* what) {
    if (!holds) throw std::runtime_error("fastddp: " + path + " cannot be read: " + what);
  };
  check(bytes >= sizeof(Header), "it is too short for a page of a rank");
  Header header;
  std::memcpy(&header, data, sizeof(header));
  check(header.magic == kMagic, "it is no page of a rank, or one that is being made");
  if (header.version != kVersion) {
    throw std::runtime_error("fastddp: " + path + " was written by another version of fastddp (status files of version " +
                             std::to_string(header.version) + ", these are of version " + std::to_string(kVersion) +
                             "): read it with that one");
  }
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
  snapshot.generation = live.generation;
  if (snapshot.job != 0) snapshot.script.assign(live.script.data(), strnlen(live.script.data(), live.script.size()));
  static_cast<Pulse&>(snapshot) = pulse_of(live);
  check(snapshot.doing <= kLastDoing, "what it says makes no sense");
  snapshot.seconds = seconds_since(snapshot.since);
  snapshot.state = live.state;
  const size_t buckets = std::min(live.buckets.load(), header.buckets);
  snapshot.bucket = number_below(live.doing_bucket, live.buckets);
  snapshot.last_parameter = number_below(live.last_parameter, snapshot.names.size());
  if (const auto sequence = live.sequence.load(); sequence > 0) snapshot.sequence = sequence - 1;
  snapshot.runs_user_code = live.runs_user_code != 0;
  snapshot.device_seconds = seconds_since(live.device_since);
  snapshot.fails_for_others = live.failed_window == snapshot.windows + 1;
  snapshot.process_ends = live.ends.load(std::memory_order_acquire) != 0;
  if (snapshot.process_ends) snapshot.error.assign(live.error.data(), strnlen(live.error.data(), live.error.size()));

  const auto window_begin = snapshot.windows > 0 ? end_of(live, snapshot.windows) : 0;
  const auto* const rows = reinterpret_cast<const BucketRow*>(data + rooms.buckets);
  for (size_t i = 0; i < buckets; ++i) {
    auto& bucket = snapshot.buckets.emplace_back();
    bucket.bytes = rows[i].bytes;
    if (rows[i].started <= window_begin) continue;
    bucket.started = seconds_since(rows[i].started);
    bucket.collectives = collectives_of(rows[i]);
  }
  const auto* const parameters = reinterpret_cast<const ParameterRow*>(data + rooms.parameters);
  for (size_t i = 0; i < header.parameters; ++i) {
    snapshot.came.push_back(parameters[i].window == snapshot.windows + 1);
    if (const auto bucket = number_below(parameters[i].bucket, buckets)) snapshot.buckets[*bucket].members.push_back(i);
  }
  snapshot.step_seconds = steps_of(live);
  return snapshot;
}

Snapshot read_page(const std::string& path) {
  const auto copy = copy_of_page(path);
  return read_page(copy.data(), copy.size(), path);
}

std::optional<Snapshot> try_to_read_page(const std::string& path) {
  try {
    return read_page(path);
  } catch (const std::runtime_error&) {
    return std::nullopt;
  }
}

Life life_of_owner(const std::string& path) {
  try {
    Header header;
    const auto copy = copy_of_page(path, sizeof(header));
    if (copy.size() < sizeof(header)) return Life::unknown;
    std::memcpy(&header, copy.data(), sizeof(header));
    return header.magic == kMagic ? life_of(header.process) : Life::unknown;
  } catch (const std::runtime_error&) {  // it has gone meanwhile
    return Life::unknown;
  }
}

namespace {

// 0: it has not said, or nobody knows.
uint64_t job_of(const std::string& path) {
  const auto found = try_to_read_page(path);
  return found ? found->job : 0;
}

}  // namespace

void remove_left_pages() {
  std::vector<std::string> left;
  std::vector<std::string> others;
  for (auto& path : shared_pages()) (life_of_owner(path) == Life::gone ? left : others).push_back(std::move(path));
  if (left.empty()) return;  // then nobody's page need be read

  std::set<uint64_t> running;
  for (const auto& path : others) running.insert(job_of(path));
  for (const auto& path : left) {
    const uint64_t job = job_of(path);
    if (job == 0 || !running.contains(job)) remove_page(path);
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
