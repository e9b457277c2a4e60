#include "watch/diagnosis.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>

#include "watch/links.h"

namespace fastddp {
namespace {

// A rank that has changed within this time goes on.
constexpr double kGoesOn = 1.5;  // seconds

std::string megabytes(double bytes) {
  return formatted("%.2f MB", bytes * 1e-6);
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

std::string bucket(const Record& record) {
  return bucket_in_words(record) + " of " + std::to_string(record.buckets);
}

std::string where(const Record& record) {
  if (!record.other_model.empty()) return "waiting for " + record.other_model;
  if (record.device == Record::Device::waits) return "waiting for " + bucket(record) + " on the device";
  switch (record.doing) {
    case What::nothing:
      return "before its first step";
    case What::forward:
      return "in forward";
    case What::after_forward:
      return "between forward and backward";
    case What::backward:
      return "in backward" + missing(record) + last(record);
    case What::tick:
    case What::finish:
    case What::gather:
      return (record.waits() ? "waiting for " : "in the communication hook of ") + bucket(record);
    case What::closing:
      return "waiting for the end of the step, after all buckets";
    case What::after_backward:
      return "past its backward (an optimizer's step has not begun)";
    case What::optimizer:
      return "in the optimizer's step";
    case What::after_optimizer:
      return "between two steps";
    case What::agree:
      return "waiting for the other ranks, in a collective that fastddp makes beside the gradients'";
    default:
      return "";
  }
}

// " (process 17 on node1)"
std::string processes(const std::vector<Record>& records) {
  std::vector<std::string> all;
  for (const auto& record : records) all.push_back(std::to_string(record.process.pid) + " on " + record.host);
  return (all.size() == 1 ? " (process " : " (processes ") + listed(all) + ")";
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
      break;
  }
  return record.process_ends ? std::optional(Cause::gone) : std::nullopt;
}

// A rank that ended after an error of its backward ended because another rank had ended before.
std::vector<Record> without_those_that_followed(const std::vector<Record>& records) {
  const auto has_ended = [](const Record& of) { return cannot_go_on(of) == Cause::gone; };
  const auto came_first = [&](const Record& of) { return has_ended(of) && !of.has_raised(); };
  auto rest = records;
  if (std::ranges::any_of(records, came_first)) {
    std::erase_if(rest, [&](const Record& of) { return has_ended(of) && of.has_raised(); });
  }
  return rest;
}

// The cause in a rank that waits for nobody.
Cause cause_of(const Record& record) {
  if (record.state == WindowState::partial) return Cause::other_graph;
  if (record.still < kGoesOn) return Cause::slow;
  if (record.device == Record::Device::computes) return Cause::device;
  switch (record.doing) {
    case What::forward:
      return Cause::forward;
    case What::after_forward:
      return Cause::loss;
    case What::backward:
      return Cause::backward;
    case What::tick:
      return Cause::hook;
    case What::after_backward:
      return Cause::after_backward;
    case What::optimizer:
      return Cause::optimizer;
    default:
      return Cause::outside;
  }
}

bool is_in_data_loader(const Record& record) {
  return std::ranges::any_of(record.stack, [](const auto& line) { return line.find("torch/utils/data") != std::string::npos; });
}

// Whether it waits, since after some rank has begun to wait here, in another collective that this one would have to join. Python
// writes the line (fastddp/watch/python_calls.py).
bool waits_in_vain(const Record& record, const std::vector<Record>& waiting) {
  const auto began = [](const Record& of) { return of.written - static_cast<int64_t>(of.seconds * 1e3); };
  const auto is_awaited = [&](const Record& of) { return record.stack_at > began(of); };
  const auto is_collective = [](const auto& line) { return line.starts_with("(a collective of all ranks"); };
  return std::ranges::any_of(waiting, is_awaited) && std::ranges::any_of(record.stack, is_collective);
}

Prospect prospect(const std::vector<Finding>& findings, const std::vector<Record>& waiting,
                  const std::vector<Record>& elsewhere) {
  if (findings.empty() || findings.front().cause == Cause::slow) return Prospect::goes_on;
  const auto is_own_code = [](const Finding& of) {
    return of.cause == Cause::uninterruptible || (of.cause >= Cause::outside && of.cause <= Cause::optimizer);
  };
  if (!std::ranges::all_of(findings, is_own_code)) return Prospect::stuck;
  const auto may_go_on = [&](const Record& of) { return !of.has_raised() && !waits_in_vain(of, waiting); };
  const bool some_may = elsewhere.empty() || std::ranges::any_of(elsewhere, may_go_on);
  return some_may ? Prospect::may_go_on : Prospect::stuck;
}

// Whether it ended without a known error, outside of a step: its page is gone with it, or says so.
bool has_ended_in_order(const Record& record) {
  const bool is_between = record.doing == What::after_backward || record.doing == What::after_optimizer;
  return record.is_stale || (record.process_ends && is_between && !record.has_raised());
}

std::string how_it_ended(const Record& record, const std::string& processes) {
  const std::string has_ended = record.life == Life::gone ? "has ended" : "is ending";
  const auto was = record.is_stale ? "" : " It was " + where(record) + ".";
  if (!record.error.empty()) return has_ended + processes + ", by " + record.error + "." + was;
  if (has_ended_in_order(record)) {
    const auto steps = std::to_string(record.windows) + (record.windows == 1 ? " step" : " steps");
    return has_ended + " in good order after " + steps + processes + ", and the others go on with step " +
           std::to_string(record.windows + 1) +
           ": it had less to train on, it seems, or a backward of its raised before it reached the model, and was caught. Give "
           "all ranks as many batches (drop_last=True in sampler and loader), or put the loop under model.join().";
  }
  if (record.process_ends) return has_ended + processes + "." + was;
  return has_ended + processes + "." + was + " Look at what it printed last, and at the kernel's log for \"Out of memory\".";
}

// `processes`: of all ranks of the cause. They share the sentence of the first one: the others' would differ only in numbers.
std::string sentence(Cause cause, const Record& record, const std::string& processes) {
  const auto is = [&](const std::string& what) { return what + " for " + in_seconds(record.seconds) + processes; };
  const auto was = " It was " + where(record) + ".";
  switch (cause) {
    case Cause::gone:
      return how_it_ended(record, processes);
    case Cause::stopped:
      return "is stopped" + processes + ", by SIGSTOP or a debugger." + was + " kill -CONT " +
             std::to_string(record.process.pid) + " lets it go on.";
    case Cause::uninterruptible:
      return "waits in the kernel" + processes + ", mostly for a file system or a device." + was +
             " dmesg on that machine may tell more.";
    case Cause::silent:
      return "says nothing: its process or its machine is gone, or cannot reach the store.";
    case Cause::outside:
      return is(is_in_data_loader(record) ? "waits for its data loader,"
                                          : "is between two steps (data loading, evaluation, a checkpoint or other code),") +
             ".";
    case Cause::forward:
    case Cause::loss:
    case Cause::optimizer:
      return is("is " + where(record)) + ".";
    case Cause::hook:
      return is("is in the communication hook of " + bucket_in_words(record)) + ".";
    case Cause::device:
      return is("has a device that does not come to " + bucket(record) + ": a kernel before it does not end,") +
             " Its host is past that, " + where(record) + ".";
    case Cause::backward:
      return is("is in backward") + missing(record) + last(record) + ".";
    case Cause::other_graph:
      return "has ended its backward without all gradients" + processes + missing(record) +
             ". Its graph is another one than on the ranks that wait: find_unused_parameters=True allows that.";
    case Cause::after_backward:
      return is("is past its backward, in code outside of the model (an optimizer's step has not begun),") + ".";
    case Cause::slow:
      return "is still at work: it is " + where(record) + processes + ". No action is needed" +
             (record.doing == What::after_optimizer ? ", unless it steps without a backward that reaches the model." : ".");
    default:
      return "";
  }
}

// What ranks are compared by: a number that sorts them, and the same in words.
using Place = std::pair<uint64_t, std::string>;
using Groups = std::map<Place, std::vector<int>>;

Groups grouped(const std::vector<Record>& records, Place (*place)(const Record&)) {
  Groups groups;
  for (const auto& record : records) groups[place(record)].push_back(record.rank);
  return groups;
}

const Groups::value_type& largest(const Groups& groups) {
  return *std::ranges::max_element(groups, {}, [](const auto& group) { return group.second.size(); });
}

// The ranks that differ from most; all ranks, if there is a tie.
std::vector<int> minority(const Groups& groups) {
  const auto most = largest(groups).second.size();
  const auto as_many = std::ranges::count_if(groups, [&](const auto& group) { return group.second.size() == most; });
  std::vector<int> others;
  for (const auto& [place, ranks] : groups) {
    if (ranks.size() != most || as_many > 1) others.insert(others.end(), ranks.begin(), ranks.end());
  }
  std::ranges::sort(others);
  return others;
}

// The ways (from a host to an address) on which ranks get no answer; none, if all are answered.
std::optional<Finding> unanswered(const std::vector<Record>& records) {
  struct Way {
    std::vector<int> ranks;
    double seconds = 0;
  };
  std::map<std::pair<std::string, std::string>, Way> ways;
  for (const auto& record : records) {
    for (const auto& address : record.unanswered) {
      auto& way = ways[{record.host, address}];
      way.ranks.push_back(record.rank);
      way.seconds = std::max(way.seconds, record.still);
    }
  }
  if (ways.empty()) return std::nullopt;
  std::vector<std::string> said;
  for (const auto& [ends, way] : ways) {
    said.push_back("from " + ends.first + " (" + named(way.ranks) + ") to " + ends.second + ", for up to " +
                   in_seconds(way.seconds));
  }
  return Finding{Cause::network,
                 {},
                 "The network is down on these ways, or the machine at their end: " + listed(said) +
                     ". What was sent there is not acknowledged, as it would be even if all processes there hung. Look at "
                     "cables, switches, firewalls, and at that machine."};
}

Place place_of(const Record& record) {
  return {0, where(record)};
}

// In what ranks that all wait may differ. The first difference counts.
struct Comparison {
  Cause cause;
  Place (*place)(const Record&);
  const char *differs, *remedy;
};
constexpr std::array<Comparison, 4> kComparisons{{
    {Cause::windows_apart, [](const Record& of) { return Place{of.windows, "in step " + std::to_string(of.windows + 1)}; },
     "is not in the same step as the others", "A rank has left out a backward, or run one more."},
    {Cause::other_order, place_of, "waits for something else than the others",
     "Collectives of this process group, or models, have another order there."},
    {Cause::other_shapes, [](const Record& of) { return Place{of.bytes, std::to_string(of.bytes) + " bytes"}; },
     "has another bucket than the others",
     "Parameters have another shape or dtype there, or the communication hook is another one."},
    {Cause::other_collective,
     [](const Record& of) { return Place{of.sequence.value_or(0), std::to_string(of.sequence.value_or(0))}; },
     "has called another number of collectives of this process group",
     "Look for one that not all ranks call (a barrier, a metric, another wrapper, SyncBatchNorm)."},
}};

Finding compare(const std::vector<Record>& waiting) {
  for (const auto& [cause, place, differs, remedy] : kComparisons) {
    const auto groups = grouped(waiting, place);
    if (groups.size() == 1) continue;
    std::string places;
    for (const auto& [at, ranks] : groups) places += (places.empty() ? "" : "; ") + named(ranks) + ": " + at.second;
    return {cause, minority(groups), differs + (": " + places + ". ") + remedy};
  }
  const auto fastest = std::ranges::max(waiting, {}, [](const Record& of) { return of.moved; }).moved;
  if (carries_bytes(fastest)) {
    return {Cause::slow,
            {},
            "Every rank is " + where(waiting.front()) + ", and the network carries bytes: " + megabytes(fastest) +
                " a second on the busiest rank. It is slow, and goes on."};
  }
  return {Cause::network,
          {},
          "Every rank is " + where(waiting.front()) +
              ": all have sent what they have, and none has got it back. The network between them "
              "does not carry it, or a collective of the user's on the same group is in between."};
}

// What most of the waiting ranks wait for.
std::string headline(const std::vector<Record>& waiting, size_t step, int ranks) {
  std::string text = "step " + std::to_string(step) + " stands still";
  if (waiting.empty()) return text + ".";
  const auto longest = std::ranges::max(waiting, {}, [](const Record& of) { return of.seconds; });
  text += ": " + std::to_string(waiting.size()) + " of " + std::to_string(ranks) + (ranks == 1 ? " rank is " : " ranks are ") +
          largest(grouped(waiting, place_of)).first.second;
  if (longest.bytes > 0) {
    text += " (" + megabytes(static_cast<double>(longest.bytes)) +
            (longest.collectives.empty() ? "" : "; " + longest.collectives) + ")";
  }
  std::vector<int> who;
  for (const auto& record : waiting) who.push_back(record.rank);
  return text + ", for " + in_seconds(longest.seconds) + ": " + named(who) + ".";
}

}  // namespace

Report diagnose(const std::vector<Record>& records, int ranks) {
  std::map<Cause, std::vector<Record>> found;
  std::vector<Record> waiting, elsewhere;
  std::set<int> known;
  for (const auto& record : records) known.insert(record.rank);
  Report report;
  report.ranks = ranks;
  int64_t written = 0;
  for (const auto& record : records) {
    report.step = std::max(report.step, record.windows + 1);
    written = std::max(written, record.written);
  }
  report.time = time_of_day(written);
  for (auto& record : without_those_that_followed(records)) {
    if (record.is_stale) record.windows = report.step - 1;  // no step ends without it
    if (const auto cause = cannot_go_on(record)) {
      found[*cause].push_back(record);
    } else {
      (record.waits() ? waiting : elsewhere).push_back(record);
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    Record silent;
    silent.rank = rank;
    if (!known.contains(rank)) found[Cause::silent].push_back(silent);
  }
  const auto ways = unanswered(records);
  const bool some_cannot = ways || !found.empty();
  // If nobody waits for a bucket, ranks may wait for each other in the module's own collectives: those furthest behind count.
  auto last = Cause::slow;
  for (const auto& record : elsewhere) last = std::min(last, cause_of(record));
  for (const auto& record : elsewhere) {
    if (some_cannot && record.has_raised()) continue;  // because of a rank that cannot go on
    const auto cause = cause_of(record);
    if (!waiting.empty() || (!some_cannot && cause == last)) found[cause].push_back(record);
  }
  for (const auto& [cause, alike] : found) {
    std::vector<int> of;
    for (const auto& record : alike) of.push_back(record.rank);
    report.findings.push_back({cause, of, sentence(cause, alike.front(), processes(alike))});
  }
  if (ways) report.findings.push_back(*ways);
  std::ranges::sort(report.findings, {}, &Finding::cause);
  // A rank that goes on is no cause beside one that does not: it ends because a collective has failed, or is late with the rest.
  const auto is_slow = [](const Finding& of) { return of.cause == Cause::slow; };
  if (!std::ranges::all_of(report.findings, is_slow)) std::erase_if(report.findings, is_slow);
  if (report.findings.empty() && !waiting.empty()) report.findings.push_back(compare(waiting));
  report.prospect = prospect(report.findings, waiting, elsewhere);
  report.headline = headline(waiting, report.step, ranks);
  if (!report.findings.empty() && !report.findings.front().ranks.empty()) {
    const auto first = std::ranges::find(records, report.findings.front().ranks.front(), &Record::rank);
    if (first != records.end()) report.stack = first->stack;
  }
  return report;
}

}  // namespace fastddp
