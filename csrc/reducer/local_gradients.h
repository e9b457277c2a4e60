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

// Note [Too large]
// The highest bit of an exponent that flips makes 3e36 of 0.01. That is finite, and may be so for as long as training lasts: in
// Adam's second moment it becomes infinite, so that the element never moves again; and a norm that is clipped by leaves nothing
// of the step. So it is told before the optimizer's step, like what is not finite. Where the limit is: at a norm whose square is
// no number any more in what adds it up, 1.8e19 in fp32 (fp64: 1.3e154). No scaled loss comes near.
//
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

  // The norm of this parameter's gradient from which on it is: note [Too large].
  double too_large(size_t parameter) const;

  // What is known without a wait for a device: whether something is not finite, or too large, or so large that a sum over as
  // many ranks may not be finite.
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
    bool
        in_result;  // all ranks' own were finite, and what has come here is not: other ranks may have got something else
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
