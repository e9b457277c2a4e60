// What this rank's gradients were before ranks added them up, by parameter: note [Local sums], pack/local_sums.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "bucket/buckets.h"
#include "pack/measured.h"
#include "window/window.h"

namespace fastddp {

class Closing;
class Ticks;

// Buckets measure what they pack. What travels beside them is measured here.
class LocalGradients {
 public:
  LocalGradients(Buckets& buckets, const Window& window) : buckets_(buckets), window_(window) {}

  // Whether to measure, from the next window on, in the buckets that there are and in those that come; between two windows.
  void watch(bool watching);
  bool are_watched() const { return buckets_.measure_locally(); }

  // Begins a window.
  void reset();
  // Backward has ended: sparse gradients, and what came behind its bucket.
  void measure_beside_buckets();

  // What is known without a wait for a device: whether something is not finite, or so large that a sum over as many ranks may
  // not be.
  bool may_spoil_a_sum(int ranks) const;
  // How many elements are not finite, on the device of the first bucket; undefined: no device has measured anything.
  at::Tensor not_finite_count() const;

  // Of the last window, by parameter: [parameters, 2] fp64 on the CPU, the sum of squares and how many elements are not
  // finite. The host waits for the device.
  at::Tensor read() const;

  // A window in which gradients were not finite.
  struct Noticed {
    size_t window;
    bool by_all;  // every rank of the exchange knows it now, before its next forward
  };
  // Of the window that ends: whether some were not finite on a rank, or what they add up to may not be. On the CPU what the
  // gradients have become is counted then, because whoever looks next may come behind zero_grad().
  void judge(size_t window, int ranks, const Closing& closing, const Ticks& ticks);
  // Of an earlier one, if that is known only now.
  void notice_late(Closing& closing);
  // Once. Nothing waits.
  std::optional<Noticed> take_not_finite();
  // By parameter, how many elements of the synchronised gradients are not finite: int64 on the CPU. None: they were not counted.
  const std::optional<at::Tensor>& synchronised() const { return synchronised_; }

 private:
  void notice_now(const Noticed& noticed);
  void measure(size_t parameter, const at::Tensor& gradient);

  Buckets& buckets_;
  const Window& window_;
  std::vector<std::pair<size_t, Measured>> on_host_;  // with the parameter
  std::vector<std::pair<size_t, at::Tensor>> on_device_;
  std::optional<Noticed> noticed_;
  std::optional<at::Tensor> synchronised_;
};

}  // namespace fastddp
