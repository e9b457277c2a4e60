#include "watch/diagnosis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <sstream>

namespace fastddp {
namespace {

// A rank in which something has changed so lately goes on.
constexpr double kGoesOn = 1.5;  // seconds
constexpr size_t kMostListed = 16;

std::string seconds(double count) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", count);
  return text.data();
}

std::string megabytes(uint64_t bytes) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f MB", static_cast<double>(bytes) * 1e-6);
  return text.data();
}

template <typename Things>
std::string listed(const Things& things) {
  std::ostringstream out;
  size_t count = 0;
  for (const auto& thing : things) {
    if (count == kMostListed) break;
    out << (count++ > 0 ? ", " : "") << thing;
  }
  if (things.size() > kMostListed) out << ", ... (" << things.size() << " in all)";
  return out.str();
}

std::string named(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

std::string missing(const Record& record) {
  if (record.missing.empty()) return "";
  std::string text = "; bucket " + std::to_string(record.tick) + " lacks the gradient of " + record.missing.front();
  if (record.missing_count > 1) text += " and " + std::to_string(record.missing_count - 1) + " more";
  return text;
}

std::string last(const Record& record) {
  return record.last_parameter.empty() ? "" : "; the last gradient that came is that of " + record.last_parameter;
}

std::string where(const Record& record) {
  switch (record.doing) {
    case Doing::nothing:
      return "before its first step";
    case Doing::forward:
      return "in forward";
    case Doing::after_forward:
      return "between forward and backward";
    case Doing::backward:
      return "in backward" + missing(record) + last(record);
    case Doing::tick:
    case Doing::finish:
      return (record.waits() ? "waiting for bucket " : "in the communication hook of bucket ") +
             std::to_string(record.bucket.value_or(0)) + " of " + std::to_string(record.buckets);
    case Doing::closing:
      return "waiting for the end of the step, behind all buckets";
    case Doing::after_backward:
      return "past its backward (an optimizer's step has not begun)";
    case Doing::optimizer:
      return "in the optimizer's step";
    case Doing::after_optimizer:
      return "between two steps";
  }
  return "";
}

std::string process(const Record& record) {
  return "process " + std::to_string(record.pid) + " on " + record.host;
}

std::optional<Cause> cannot_go_on(const Record& record) {
  switch (record.life) {
    case Life::gone:
      return Cause::gone;
    case Life::stopped:
      return Cause::stopped;
    case Life::uninterruptible:
      if (record.still > kGoesOn) return Cause::uninterruptible;
      return std::nullopt;
    case Life::runs:
    case Life::unknown:
      return std::nullopt;
  }
  return std::nullopt;
}

// Of a rank that waits for nobody.
Cause cause_of(const Record& record) {
  if (record.state == "partial") return Cause::other_graph;
  if (record.still < kGoesOn) return Cause::slow;
  switch (record.doing) {
    case Doing::forward:
      return Cause::forward;
    case Doing::after_forward:
      return Cause::loss;
    case Doing::backward:
      return Cause::backward;
    case Doing::tick:
      return Cause::hook;
    case Doing::after_backward:
      return Cause::after_backward;
    case Doing::optimizer:
      return Cause::optimizer;
    default:
      return Cause::outside;
  }
}

// Its backward has raised, and its step has not ended.
bool has_raised(const Record& record) {
  return record.doing == Doing::after_backward && record.state == "reducing";
}

bool is_in_data_loader(const Record& record) {
  return std::ranges::any_of(record.stack, [](const auto& line) {
    return line.find("torch/utils/data/") != std::string::npos || line.find("dataloader") != std::string::npos;
  });
}

std::string sentence(Cause cause, const Record& record) {
  const auto is = [&](const std::string& what) {
    return what + " since " + seconds(record.seconds) + " (" + process(record) + ")";
  };
  const auto was = " It was " + where(record) + ".";
  switch (cause) {
    case Cause::gone:
      return "has ended (" + process(record) + ")." + (record.is_stale ? "" : was) +
             " Look at what it printed last, and at the kernel's log for \"Out of memory\".";
    case Cause::stopped:
      return "is stopped (" + process(record) + "), by SIGSTOP or a debugger." + was + " kill -CONT " +
             std::to_string(record.pid) + " lets it go on.";
    case Cause::uninterruptible:
      return "waits in the kernel (" + process(record) + "), mostly for a file system or a device." + was +
             " dmesg on that machine may tell more.";
    case Cause::silent:
      return "says nothing: its process or its machine is gone, or cannot reach the store.";
    case Cause::outside:
      return is(is_in_data_loader(record)
                    ? "waits for its data loader,"
                    : "is between two steps (data loading, evaluation, a checkpoint or other code),") +
             ".";
    case Cause::forward:
      return is("is in forward") + ".";
    case Cause::loss:
      return is("is between forward and backward") + ".";
    case Cause::hook:
      return is("is in the communication hook of bucket " + std::to_string(record.bucket.value_or(0))) + ".";
    case Cause::backward:
      return is("is in backward") + missing(record) + last(record) + ".";
    case Cause::other_graph:
      return "has ended its backward without all gradients (" + process(record) + ")" + missing(record) +
             ". Its graph is another one than on the ranks that wait: find_unused_parameters=True allows that.";
    case Cause::after_backward:
      return is("is past its backward, in code outside of the model (an optimizer's step has not begun),") + ".";
    case Cause::optimizer:
      return is("is in the optimizer's step") + ".";
    case Cause::slow:
      return is("goes on, and is behind: it is " + where(record)) + ".";
    default:
      return "";
  }
}

// How far in the step, of those that wait for nobody: the last ones come first.
int place(Cause cause) {
  return static_cast<int>(cause);
}

// Findings of one cause that read alike but for numbers share a sentence: that of the first rank.
class Findings {
 public:
  void add(Cause cause, const Record& record) {
    auto& of = by_cause_[cause];
    of.ranks.push_back(record.rank);
    if (of.ranks.size() == 1) of = {cause, of.ranks, sentence(cause, record)};
  }
  std::vector<Finding> take() {
    std::vector<Finding> all;
    for (auto& [cause, finding] : by_cause_) all.push_back(std::move(finding));
    return all;
  }
  bool empty() const { return by_cause_.empty(); }

 private:
  std::map<Cause, Finding> by_cause_;
};

template <typename Key>
std::map<Key, std::vector<int>> grouped(const std::vector<Record>& records, Key (*key)(const Record&)) {
  std::map<Key, std::vector<int>> groups;
  for (const auto& record : records) groups[key(record)].push_back(record.rank);
  return groups;
}

// The ranks that are not like most; with two equal halves all of them.
template <typename Key>
std::vector<int> minority(const std::map<Key, std::vector<int>>& groups) {
  const auto most = std::ranges::max_element(groups, {}, [](const auto& group) { return group.second.size(); });
  const auto as_many =
      std::ranges::count_if(groups, [&](const auto& group) { return group.second.size() == most->second.size(); });
  std::vector<int> others;
  for (const auto& [key, ranks] : groups) {
    if (key != most->first || as_many > 1) others.insert(others.end(), ranks.begin(), ranks.end());
  }
  std::ranges::sort(others);
  return others;
}

template <typename Key, typename Say>
std::string each(const std::map<Key, std::vector<int>>& groups, const Say& say) {
  std::string text;
  for (const auto& [key, ranks] : groups) text += (text.empty() ? "" : "; ") + named(ranks) + " " + say(key);
  return text;
}

// Of ranks that all wait for others.
Finding compare(const std::vector<Record>& waiting) {
  const auto windows = grouped<size_t>(waiting, [](const Record& of) { return of.windows; });
  if (windows.size() > 1) {
    return {Cause::windows_apart, minority(windows),
            "is not in the same step as the others: " + each(windows, [](size_t ended) {
              return "in step " + std::to_string(ended + 1);
            }) + ". A rank has left out a backward, or run one more."};
  }
  const auto places = grouped<std::string>(waiting, where);
  const auto sequences = grouped<uint64_t>(waiting, [](const Record& of) { return of.sequence.value_or(0); });
  if (places.size() > 1) {
    return {Cause::other_order, minority(places),
            "waits for something else than the others: " + each(places, [](const std::string& at) {
              return "is " + at;
            }) + ". Collectives of this process group have another order there."};
  }
  const auto bytes = grouped<uint64_t>(waiting, [](const Record& of) { return of.bytes; });
  if (bytes.size() > 1) {
    return {Cause::other_shapes, minority(bytes),
            "has another bucket than the others: " + each(bytes, [](uint64_t count) {
              return "sends " + std::to_string(count) + " bytes";
            }) + ". Parameters have another shape or dtype there, or the communication hook is another one."};
  }
  if (sequences.size() > 1) {
    return {Cause::other_collective, minority(sequences),
            "has called another number of collectives of this process group: " + each(sequences, [](uint64_t count) {
              return std::to_string(count);
            }) + ". Look for one that not all ranks call (a barrier, a metric, another wrapper, SyncBatchNorm)."};
  }
  return {Cause::network,
          {},
          "Every rank is " + where(waiting.front()) +
              ": all have sent what they have, and none has got it back. The network between them "
              "does not carry it, or a collective of the user's on the same group is in between."};
}

// What those that wait for others wait for, mostly.
std::string headline(const std::vector<Record>& waiting, size_t step, int ranks) {
  std::string text = "step " + std::to_string(step) + " stands still";
  if (waiting.empty()) return text + ".";
  const auto places = grouped<std::string>(waiting, where);
  const auto most = std::ranges::max_element(places, {}, [](const auto& group) { return group.second.size(); });
  const auto longest = std::ranges::max(waiting, {}, [](const Record& of) { return of.seconds; });
  text += ": " + std::to_string(waiting.size()) + " of " + std::to_string(ranks) +
          (ranks == 1 ? " rank is " : " ranks are ") + most->first;
  if (longest.bytes > 0) text += " (" + megabytes(longest.bytes) + ")";
  return text + ", since " + seconds(longest.seconds) + ".";
}

}  // namespace

const char* to_string(Cause cause) {
  constexpr std::array names{
      "gone",          "stopped",      "uninterruptible",  "silent",      "outside",        "forward",
      "loss",          "hook",         "backward",         "other_graph", "after_backward", "optimizer",
      "windows_apart", "other_shapes", "other_collective", "other_order", "network",        "slow"};
  return names.at(static_cast<size_t>(cause));
}

Report diagnose(const std::vector<Record>& records, int ranks) {
  Findings found;
  std::vector<Record> waiting, elsewhere;
  std::set<int> known;
  for (const auto& record : records) {
    known.insert(record.rank);
    if (const auto cause = cannot_go_on(record)) {
      found.add(*cause, record);
    } else {
      (record.waits() ? waiting : elsewhere).push_back(record);
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    Record silent;
    silent.rank = rank;
    if (!known.contains(rank)) found.add(Cause::silent, silent);
  }
  const bool some_cannot = !found.empty();
  // Where nobody waits for a bucket, ranks may wait for each other in the module's own collectives: the last ones count.
  auto last = Cause::slow;
  for (const auto& record : elsewhere) last = std::min(last, cause_of(record));
  for (const auto& record : elsewhere) {
    if (some_cannot && has_raised(record)) continue;  // because of one of these
    const auto cause = cause_of(record);
    if (!waiting.empty() || (!some_cannot && place(cause) == place(last))) found.add(cause, record);
  }
  Report report;
  report.ranks = ranks;
  for (const auto& record : records) report.step = std::max(report.step, record.windows + 1);
  report.findings = found.take();
  // Who goes on is no cause beside one that does not: on its way out, because a collective has failed, or late with the rest.
  const auto is_slow = [](const Finding& of) { return of.cause == Cause::slow; };
  if (!std::ranges::all_of(report.findings, is_slow)) std::erase_if(report.findings, is_slow);
  if (report.findings.empty() && !waiting.empty()) report.findings.push_back(compare(waiting));
  report.headline = headline(waiting, report.step, ranks);
  if (!report.findings.empty() && !report.findings.front().ranks.empty()) {
    const auto first = report.findings.front().ranks.front();
    for (const auto& record : records) {
      if (record.rank == first) report.stack = record.stack;
    }
  }
  return report;
}

bool Report::is_soft() const {
  return findings.empty() || findings.front().cause == Cause::slow;
}

std::string Report::text() const {
  std::string out = "fastddp: " + headline;
  for (const auto& finding : findings) {
    out += "\n  " + (finding.ranks.empty() ? "" : named(finding.ranks) + " ") + finding.text;
  }
  if (!stack.empty()) out += "\n  Python code of " + named({findings.front().ranks.front()}) + ":";
  for (const auto& line : stack) out += "\n    " + line;
  return out;
}

}  // namespace fastddp
