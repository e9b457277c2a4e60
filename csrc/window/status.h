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
// What every rank tells the others at the end of a window, whatever the exchange: whether the window failed on it and, where that
// is not known beforehand, which parameters it used. Where one rank fails, all do: an average without one
// rank's share would pass for a gradient, and ranks that step with it would drift apart from the rank that repeats the step.
// It travels in the last message of the buckets, where that has room for it (Driver::status_tick). Otherwise it is a collective
// of its own, which starts before we wait for the last buckets, and travels beside them; under a hook that may still start some,
// after them.
//
// A backward that raises before it reaches the model, or reaches no parameter of it, has no window. That rank goes on, and its next
// backward would meet the other ranks' last one. So each rank also tells how many steps it has missed so since the last window. If
// the numbers differ, the window has failed. Forwards are not counted: ranks may have as many as they like.
//
// If a rank uses two models in another order, a window of one meets a window of the other, and their gradients may have the
// same size. So each rank also tells the number of the model within its group.
//
// What travels are numbers that ranks add up: a header, zero where a rank has nothing to say, then two a parameter. A value is
// a 1 and its bits: if all ranks that have one sent the same, the sum of each bit is 0 or the number of these ranks. So sums stay
// small, and are exact in 16 bits as well.
//
// Where the host waits for collectives anyway, it knows the status before backward returns. Otherwise (NCCL) the status is
// copied to the host without a wait, and whoever comes next reads it: the next forward or optimizer step at the earliest.
//
// Where gradients are measured (note [Local sums], pack/local_sums.h), each rank also tells whether some of its gradients are
// not finite. On the CPU the host knows it; on other devices the numbers that say so are multiplied by 0 or 1 on the device.
//
// A status of its own is sent and read with the side stream current: it has no place in the order of gradients, and memory
// that it took on the stream of backward would move gradients to other addresses.
class WindowStatus {
 public:
  // What a rank says.
  struct Said {
    size_t window = 0;  // of the model
    bool failed = false;
    std::optional<size_t> missed = {};  // steps without a window before this one; none: this rank has no part in it
    float scale = 0;                    // of this rank's losses, by a GradScaler; 0: not known
    int rank = 0;                       // in the model's group
    size_t model = 0;                   // 0: ranks do not agree on a number
    bool not_finite = false;            // gradients of this rank are not, or their sum over ranks may not be
    at::Tensor not_finite_count = {};   // replaces the field above where the device knows: greater than 0 if some are not
    std::vector<Used> used = {};        // empty where it is known beforehand
  };
  void send(c10d::ProcessGroup& group, c10::Device device, const Said& said);
  // For a status that travels with gradients, on the CPU: writes what this rank says, without `used`, to the kNumbers elements
  // of `place`.
  void write(c10d::ProcessGroup& group, const at::Tensor& place, const Said& said);
  static constexpr int64_t kNumbers = 102;
  // What has come is in `sums`: times `factor`, the ranks' sums. The current stream has waited for them.
  void came(const at::Tensor& sums, double factor) {
    sums_ = sums;
    factor_ = factor;
  }
  bool is_sent() const { return group_ != nullptr; }

  // What all ranks have said.
  struct Heard {
    std::optional<std::string> failed;  // what, and on which rank, in words; none: the window is well
    bool not_finite = false;            // gradients of a rank are
    std::vector<Used> used = {};        // by parameter, how any rank used it
  };
  // The host waits.
  Heard wait();
  // The status arrives while the host goes on; the current stream waits. `window`: its number.
  void arrive_later(size_t window);

  // The first window in which a rank failed, among those whose status has arrived after arrive_later(). Returned once.
  struct Failure {
    size_t window;
    std::string what;
  };
  std::optional<Failure> take_late_failure();
  // The last window that take_late_failure() has seen in which gradients were not finite. Returned once.
  std::optional<size_t> take_late_not_finite() { return std::exchange(late_not_finite_, std::nullopt); }

  // Begins a window.
  void reset();

 private:
  struct Arriving {
    size_t window, model;  // of this rank
    c10::Device device;
    at::Tensor on_host;
    double factor;
    DeviceMoment copied;
  };

  using Numbers = std::vector<float>;
  const at::Tensor& on_device(const Said& said, c10::Device device);
  std::string who_is_where() const;

  c10d::ProcessGroup* group_ = nullptr;  // null: nothing is sent
  std::vector<int64_t> place_;           // model and window of this rank
  Numbers said_;                         // what this rank said last
  at::Tensor said_on_device_;
  at::Tensor sums_;
  double factor_ = 1.0;
  c10::intrusive_ptr<c10d::Work> work_;
  std::deque<Arriving> arriving_;
  std::optional<size_t> late_not_finite_;
};

}  // namespace fastddp
