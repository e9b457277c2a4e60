// The report about a step that stands still.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace fastddp {

// Note [Causes]
// Ranks that wait in a collective wait for someone, and the rank furthest behind is the cause. So we look first for ranks that
// cannot go on (gone, stopped, silent) and for connections without an answer, then for ranks elsewhere in the step. Only if
// every rank waits, we compare what they wait for. docs/watch.md says what to do about each cause.
enum class Cause {
  gone,              // the process no longer exists
  stopped,           // SIGSTOP, a debugger
  uninterruptible,   // in the kernel: a disk or network file system that does not answer
  network,           // a machine does not answer; or all wait for the same
  silent,            // nothing is known of the rank: its machine is gone, or cannot reach the store
  outside,           // between two steps
  forward,           // in the module
  loss,              // between forward and backward
  hook,              // in a user's communication hook
  backward,          // gradients do not come
  device,            // the host is past a bucket, but its device has not come to the bucket's collective
  other_graph,       // backward is over, and has left parameters without a gradient
  after_backward,    // between backward and optimizer
  optimizer,         // in the optimizer's step
  windows_apart,     // all wait, in different steps
  other_shapes,      // all wait for a bucket that is not the same everywhere
  other_collective,  // a rank has called another number of collectives of the group
  other_order,       // all wait, for different buckets or parts of the step
  slow,              // the rank goes on, but is behind
};
const char* to_string(Cause cause);

// Whether the step ends, as far as anyone can see. A rank in its own code may be computing, asleep, reading or writing, and no one
// knows for how long. In the order in which they get worse.
enum class Prospect { goes_on, may_go_on, stuck };

struct Finding {
  Cause cause;
  std::vector<int> ranks;
  std::string text;  // a sentence or two, and the remedy; it does not name the ranks
};

struct Report {
  size_t step = 0;  // the number of the window, from 1
  int ranks = 0;
  std::string time;  // when it was made, on a clock of the machine
  std::string headline;
  std::vector<Finding> findings;   // the first one is the most likely
  std::vector<std::string> stack;  // of the first finding's first rank
  Prospect prospect = Prospect::goes_on;

  // Whether waiting helps, because some rank goes on.
  bool is_soft() const { return prospect == Prospect::goes_on; }
  // Whether the network, which may come back, is the first suspect.
  bool may_be_an_outage() const {
    if (findings.empty()) return false;
    return findings.front().cause == Cause::network || findings.front().cause == Cause::silent;
  }
  std::string text(bool with_stack = true) const;
  // What Python gets: fastddp/watch/stall_report.py reads it.
  std::string json() const;
};

// "a, b, c"; of many things only the first ones, and how many there are.
template <typename Things>
std::string listed(const Things& things) {
  constexpr size_t most = 16;
  std::ostringstream out;
  size_t count = 0;
  for (const auto& thing : things) {
    if (count == most) break;
    out << (count++ > 0 ? ", " : "") << thing;
  }
  if (things.size() > most) out << ", ... (" << things.size() << " in all)";
  return out.str();
}
// "2026-11-24 14:02:41+0100", from ms since 1970.
std::string time_of_day(int64_t ms);
// A number as printf's `format` shows it.
std::string formatted(const char* format, double number);
// "6.5 s".
inline std::string in_seconds(double seconds) {
  return formatted("%.1f s", seconds);
}
// "rank 3", "ranks 1, 2".
std::string named(const std::vector<int>& ranks);

}  // namespace fastddp
