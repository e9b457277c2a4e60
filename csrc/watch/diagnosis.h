// Why a step stands still: a function from what the ranks say of themselves.
#pragma once

#include <string>
#include <vector>

#include "watch/record.h"

namespace fastddp {

// Note [Causes]
// Whoever is last is the cause, and ranks that wait in a collective wait for someone. So first come ranks that cannot go on
// (gone, stopped, silent), then those that are somewhere else in the step, and only if every rank waits what they wait for is
// compared. docs/watch.md says for each what to do.
enum class Cause {
  gone,              // there is no such process any more
  stopped,           // SIGSTOP, a debugger
  uninterruptible,   // in the kernel: a disk or network file system that does not answer
  silent,            // nothing is known: the machine, or the way to the store
  outside,           // between two steps
  forward,           // in the module
  loss,              // between forward and backward
  hook,              // in a user's communication hook
  backward,          // gradients do not come
  other_graph,       // backward is over, and left parameters without a gradient
  after_backward,    // between backward and optimizer
  optimizer,         // in its step
  windows_apart,     // all wait, in different steps
  other_shapes,      // all wait for a bucket that is not the same everywhere
  other_collective,  // one has called more collectives of the group
  other_order,       // all wait for different buckets or parts of the step
  network,           // all wait for the same
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
  std::string headline;
  std::vector<Finding> findings;   // the first one is the most likely
  std::vector<std::string> stack;  // of the first finding's first rank

  // Whether some rank goes on, so that waiting helps.
  bool is_soft() const;
  std::string text() const;
};

// `records`: at most one a rank; of those that are not there nothing is known.
Report diagnose(const std::vector<Record>& records, int ranks);

}  // namespace fastddp
