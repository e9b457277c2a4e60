// What is said of a step that stands still.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace fastddp {

// Note [Causes]
// Whoever is last is the cause, and ranks that wait in a collective wait for someone. So first come ranks that cannot go on
// (gone, stopped, silent) and ways on which nothing is answered, then those that are somewhere else in the step, and only if
// every rank waits what they wait for is compared. docs/watch.md says for each what to do.
enum class Cause {
  gone,              // there is no such process any more
  stopped,           // SIGSTOP, a debugger
  uninterruptible,   // in the kernel: a disk or network file system that does not answer
  network,           // a machine does not answer; or all wait for the same
  silent,            // nothing is known: the machine, or the way to the store
  outside,           // between two steps
  forward,           // in the module
  loss,              // between forward and backward
  hook,              // in a user's communication hook
  backward,          // gradients do not come
  device,            // the host is past a bucket whose collective its device has not come to
  other_graph,       // backward is over, and left parameters without a gradient
  after_backward,    // between backward and optimizer
  optimizer,         // in its step
  windows_apart,     // all wait, in different steps
  other_shapes,      // all wait for a bucket that is not the same everywhere
  other_collective,  // one has called more collectives of the group
  other_order,       // all wait for different buckets or parts of the step
  slow,              // it goes on, and is behind
};
const char* to_string(Cause cause);

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

  // Whether some rank goes on, so that waiting helps.
  bool is_soft() const;
  // Whether the network, which may come back, is what is known to be wrong.
  bool may_be_an_outage() const;
  std::string text() const;
  // As StallReport.to_json writes it.
  std::string json() const;
};

// "a, b, c", of many only the first ones and how many there are.
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
// "2026-11-24 14:02:41+0100", of ms since 1970.
std::string time_of_day(int64_t ms);
// "rank 3", "ranks 1, 2".
std::string named(const std::vector<int>& ranks);

}  // namespace fastddp
