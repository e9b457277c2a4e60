// What one rank tells the others about itself when a step stands still.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pages/snapshot.h"
#include "window/window.h"

namespace fastddp {

// What its page does not say.
struct BesideThePage {
  std::vector<std::string> stack;  // of its Python code, the innermost call last
  int64_t stack_at = 0;            // when, in ms since 1970
  // Its TCP connections (note [Links]): addresses that do not answer, and bytes that move in a second.
  std::vector<std::string> unanswered;
  double moved = 0;
};

struct Record : OfProcess, Position, BesideThePage {
  Life life = Life::runs;
  int64_t written = 0;  // ms since 1970
  double still = 0;     // seconds since anything changed; a gradient that comes is a change
  WindowState state = WindowState::idle;
  // Of the open window.
  size_t missing_count = 0;          // how many gradients the next bucket lacks
  std::vector<std::string> missing;  // the names of some of them
  std::vector<size_t> lacking;       // all parameters whose gradients have not come
  std::string last_parameter;        // that has come
  size_t buckets = 0;
  uint64_t bytes = 0;          // of `bucket`
  std::string collectives;     // that carry the bucket, by c10d's numbers, in words
  bool of_parameters = false;  // the bucket's, not its gradients
  std::string other_model;     // what it waits for in another model, if it does not wait in this one

  // The rank has removed its page. What is said above may be old, except which rank it is. Not written to the store.
  bool is_stale = false;

  // What its device does, if the device is behind the host. waits: for other ranks, in the collective of `bucket`. computes: it
  // has work to do before that collective. In both cases `bucket`, `windows` and `seconds` are the device's.
  enum class Device { with_host, waits, computes } device = Device::with_host;

  // Whether it waits for other ranks in a collective of the reducer.
  bool waits() const;
  // Whether its backward has raised, or a collective outside of it has failed, in an open step: mostly due to another rank.
  bool has_raised() const {
    const bool in_backward = doing == What::after_backward && state == WindowState::reducing;
    return !is_stale && (fails_for_others || in_backward);
  }
};

int64_t ms_since_1970();

// What a page says. `still`: as the reader has measured it.
Record record_of(const Snapshot& snapshot, Life life, double still);

// "bucket 3", "the parameters of bucket 3".
std::string bucket_in_words(const Record& record);

// Ascending numbers as text, "0-3,7", and back.
std::string ranges_of(const std::vector<size_t>& numbers);
std::vector<size_t> numbers_in(const std::string& ranges);

// A line for each field, for the store.
std::string encode(const Record& record);
// Raises std::invalid_argument if `text` is no record.
Record decode_record(const std::string& text);

}  // namespace fastddp
