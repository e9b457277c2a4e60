// What ranks tell each other when a window ends.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "window/window.h"

namespace fastddp {

// Note [Status of a window]
// The last collective of a window that every rank makes, whatever the exchange: whether the window failed on this rank, and,
// where that is not known beforehand, which parameters it used. An average without one rank's share would pass for a gradient,
// and ranks that step with it while another one repeats the step would drift apart; so where one rank fails, all do. It starts
// before the last buckets are waited for, and travels beside them; under a hook that may still start collectives, behind them.
//
// A backward that raises before it reaches the model is seen by nobody: that rank goes on with another forward, and its next
// backward would meet the other ranks' last one. So ranks tell as well how many forwards the window had, and whether a backward
// has run meanwhile that this model knows nothing of; where the first differs and a rank says the second, the window has failed.
//
// Where two models are used in another order on a rank, a window of one meets a window of the other, whose gradients may be of the
// same size. So ranks tell which model of their group it is.
//
// Bytes, of which the greatest over ranks counts: a header, whose parts are zero where a rank has nothing to say, then one a
// parameter. Numbers travel as digits (base 256) and as 255 minus each: if ranks sent different ones, these do not fit together.
//
// Where the host waits for collectives anyway, it knows the status before backward returns. Otherwise (NCCL) it is copied to
// the host without a wait, and whoever comes next finds it there: the next forward or the next optimizer step at the earliest.
//
// Where gradients are measured (note [Local sums], pack/local_sums.h), ranks tell as well whether some of theirs are not finite. On
// the CPU each knows its own; on other devices the bytes that say so are multiplied by 0 or 1 there.
//
// All of it happens on the side stream, which is current in all functions: it belongs to no order of gradients, and memory of its
// own on the stream of backward would move theirs to other addresses.
class WindowStatus {
 public:
  // What a rank says.
  struct Said {
    int rank = 0;  // among the model's
    bool failed = false;
    size_t model = 0;              // 0: ranks do not agree on a number
    size_t window = 0;             // of the model
    size_t forwards = 0;           // of the window; 0: this rank has no part in it
    bool lost_a_backward = false;  // maybe
    bool not_finite = false;       // gradients of this rank, or they may be added up to what is not
    at::Tensor not_finite_count;   // on the device, in place of the line before: above 0 if they are not
    std::vector<Used> used;        // empty where it is known beforehand
  };
  void send(c10d::ProcessGroup& group, c10::Device device, const Said& said);
  bool is_sent() const { return work_ != nullptr; }

  // The host waits.
  void wait();
  // Lets it arrive while the host goes on; the current stream waits. `window`: its number.
  void arrive_later(size_t window);

  // After wait(): what happened, and on which rank, in words; none: the window is well.
  const std::optional<std::string>& failed() const { return failed_; }
  // After wait(): whether a rank has said so.
  bool not_finite() const { return not_finite_; }
  // After wait(), by parameter: what any rank did.
  const std::vector<Used>& used() const { return used_; }

  // Of the windows whose status was to arrive later, and has: the first in which a rank failed. It is told once.
  struct Failure {
    size_t window;
    std::string what;
  };
  std::optional<Failure> take_late_failure();
  // And the last one seen there in which gradients were not finite. It is told once.
  std::optional<size_t> take_late_not_finite() { return std::exchange(late_not_finite_, std::nullopt); }

  // Begins a window.
  void reset();

 private:
  struct Arriving {
    size_t window, model;  // of this rank
    c10::Device device;
    at::Tensor on_host;
    Moment copied;
  };

  using Bytes = std::vector<uint8_t>;
  void upload(Bytes bytes, c10::Device device);
  std::string who_is_where() const;

  c10d::ProcessGroup* group_ = nullptr;
  std::vector<int64_t> place_;  // model and window of this rank
  Bytes said_;                  // last
  at::Tensor said_on_device_;
  at::Tensor wire_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::optional<std::string> failed_;
  bool not_finite_ = false;
  std::vector<Used> used_;
  std::deque<Arriving> arriving_;
  std::optional<size_t> late_not_finite_;
};

}  // namespace fastddp
