// What one rank tells the others about itself when a step stands still.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "observe/progress.h"
#include "observe/shared_page.h"

namespace fastddp {

struct Record {
  int rank = -1;
  int ranks = 0;
  std::string host;
  int pid = 0;
  Life life = Life::runs;
  int64_t written = 0;  // ms since 1970

  Doing doing = Doing::nothing;
  double seconds = 0;      // in this
  double still = 0;        // since anything has changed, gradients that come included
  bool user_code = false;  // runs
  bool ends = false;       // the interpreter is about to end
  bool followed = false;   // another rank that has ended: a collective outside of backward has failed for want of it
  std::string error;       // by which, if that is known
  std::string state;
  size_t windows = 0;  // that have ended
  std::optional<size_t> bucket;
  size_t buckets = 0;
  size_t tick = 0, finished = 0;
  uint64_t bytes = 0;       // of the bucket
  std::string collectives;  // that carry it, by c10d's numbers, in words
  std::optional<uint64_t> sequence;
  size_t missing_count = 0;          // gradients, of the bucket that is to be started next
  std::vector<std::string> missing;  // some of them
  std::string last_parameter;
  std::string other_model;         // what it waits for there, if it does not wait in this one
  std::vector<std::string> stack;  // of its Python code, the innermost call last
  // Of its TCP connections (note [Links]): who does not answer, and how many bytes move in a second.
  std::vector<std::string> unanswered;
  double moved = 0;

  // All of the above but who it is may be old: it has taken its page along. Not written.
  bool is_stale = false;

  // What its device does, where that is behind its host: waits for others in the collective of `bucket`, or has something to
  // do before it. `bucket`, `windows` and `seconds` are then of the device.
  enum class Device { with_host, waits, computes } device = Device::with_host;

  // For other ranks, in a collective of the reducer.
  bool waits() const;
  // Its backward has raised, or a collective before it has failed, and its step has not ended: for want of another rank, mostly.
  bool has_raised() const;
};

int64_t ms_since_1970();

// Seconds for which a record counts as what a rank does now.
constexpr double kFreshRecord = 45.0;

// What a page says. `still`: the reader's own measure of it.
Record record_of(const Snapshot& snapshot, Life life, double still);

// A line a field, for the store.
std::string encode(const Record& record);
// Raises std::invalid_argument for what is none.
Record decode_record(const std::string& text);

}  // namespace fastddp
