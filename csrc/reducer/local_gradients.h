// By parameter, what this rank's gradients were before ranks added them up: note [Local sums], pack/local_sums.h.
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
struct Way;

// Note [Too large]
// If the highest bit of the exponent flips, 0.01 becomes 3e36. That is finite, and may stay unnoticed for the whole training:
// Adam's second moment becomes infinite, so the element never moves again, and clipping by the norm leaves nothing of the
// step. So a gradient that is too large is reported before the optimizer's step, like one that is not finite. The limit is a
// norm whose square overflows the dtype that adds it up: 1.8e19 in fp32 (1.3e154 in fp64). No scaled loss comes near.
//
// Buckets measure what they pack. This class measures what travels beside them.
class LocalGradients {
 public:
  LocalGradients(Buckets& buckets, const Window& window) : buckets_(buckets), window_(window) {}

  // Whether to measure from the next window on, also in buckets of later plans. Between two windows.
  void watch(bool watching);
  bool are_watched() const { return buckets_.measure_locally(); }

  // As Reducer::note_loss_scale().
  void note_loss_scale(float scale) { loss_scale_ = scale; }
  float loss_scale() const { return loss_scale_; }

  // Begins a window.
  void reset() {
    beside_.clear();
    synchronised_.reset();
  }
  // After backward: measures sparse gradients, and those that their bucket did not wait for.
  void measure_beside_buckets();

  // From this norm on the parameter's gradient is too large: note [Too large].
  double too_large(size_t parameter) const;

  // Whether a gradient is not finite, or too large, or so large that a sum over so many ranks may not be finite. Only what is
  // known without a wait for a device.
  bool may_spoil_a_sum(int ranks) const;
  // How many elements are not finite, on the device of the first bucket; undefined: no device has measured anything.
  at::Tensor not_finite_count() const;

  // Of the last window: [parameters, 2] in fp64 on the CPU, the sum of squares and the number of elements that are not finite.
  // The host waits for the device.
  at::Tensor read() const;

  // A window in which gradients were not finite.
  struct Noticed {
    size_t window;
    bool by_all;     // every rank of the exchange knows it now, before its next forward
    bool in_result;  // all ranks' own gradients were finite, but the result here is not: other ranks may have another one
  };
  // Notices whether gradients of the ending window are not finite on a rank, or their sum may not be. On the CPU it then counts
  // in the synchronised gradients: whoever looks next may come after zero_grad().
  void judge(size_t window, int ranks, const Closing& closing, const Way& way);
  // Notices an earlier window that is known only now.
  void notice_late(Closing& closing);
  // Returned once. Nothing waits.
  std::optional<Noticed> take_not_finite() {
    if (!are_watched()) return std::nullopt;
    return std::exchange(noticed_, std::nullopt);
  }
  // By parameter, how many elements of the synchronised gradients are not finite: int64 on the CPU. None: they were not counted.
  const std::optional<at::Tensor>& synchronised() const { return synchronised_; }

 private:
  void notice_now(const Noticed& noticed);
  void measure(size_t parameter, const at::Tensor& gradient);

  Buckets& buckets_;
  const Window& window_;
  float loss_scale_ = 1.0;
  std::vector<std::pair<size_t, at::Tensor>> beside_;  // by parameter: the sum of squares, the number that are not finite
  std::optional<Noticed> noticed_;
  std::optional<at::Tensor> synchronised_;
};

}  // namespace fastddp
