// What ranks tell each other when a window ends.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "streams.h"
#include "usage.h"

namespace fastddp {

// Note [Status of a window]
// The last collective of a window that every rank makes, whatever the exchange: whether the window failed on this rank, and,
// where that is not known beforehand, which parameters it used. An average without one rank's share would pass for a gradient,
// and ranks that step with it while another one repeats the step would drift apart; so where one rank fails, all do. It starts
// before the last buckets are waited for, and travels beside them.
//
// Bytes, of which the greatest over ranks counts: four that are zero unless the window failed, then one a parameter. A rank that
// failed sends the two digits (base 256) of its number, and 255 minus each: if several failed, these do not fit together.
//
// Where the host waits for collectives anyway, it knows the status before backward returns. Otherwise (NCCL) it is copied to
// the host without a wait, and whoever comes next finds it there: the next forward or the next optimizer step at the earliest.
class WindowStatus {
 public:
  // `failed`: on this rank. `used`: empty where it is known beforehand.
  void send(c10d::ProcessGroup& group, c10::Device device, bool failed, const std::vector<Used>& used);
  bool is_sent() const {
    return work_ != nullptr;
  }

  // The host waits.
  void wait();
  // Lets it arrive while the host goes on; the current stream waits. `window`: its number.
  void arrive_later(size_t window);

  // After wait(): which rank failed, in words; none did.
  const std::optional<std::string>& failed() const {
    return failed_;
  }
  // After wait(), by parameter: what any rank did.
  const std::vector<Used>& used() const {
    return used_;
  }

  // Of the windows whose status was to arrive later, and has: the first in which a rank failed. It is told once.
  struct Failure {
    size_t window;
    std::string rank;
  };
  std::optional<Failure> take_late_failure();

  // Begins a window.
  void reset();

 private:
  struct Arriving {
    size_t window;
    at::Tensor on_host;
    c10::Event event;
  };

  int ranks_ = 0;
  at::Tensor wire_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::optional<std::string> failed_;
  std::vector<Used> used_;
  std::deque<Arriving> arriving_;
};

}  // namespace fastddp
