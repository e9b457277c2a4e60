// A rank's part of a bucket's gradients, where each rank keeps a part.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "bucket/bucket.h"
#include "bucket/sharding.h"

namespace fastddp {

// Note [Sharded gradients]
// With a sharded optimizer no rank needs all averages. Ranks add up each bucket's wire run by run, and a rank keeps its own run
// (note [Shards], sharding.h): the gradients of the optimizer's tensors, one for each span. They are parts of the wire if that has
// their dtype.
//
// `parameter.grad` then holds a *notice*: a tensor without memory that says where the gradient is. As long as it is there the
// gradient counts: zero_grad removes the notice, and with it the gradient. Before autograd adds to a parameter with a notice, we
// take the notice away and keep a copy of the span's gradient. When the window's averages have come, the copy is added to them. So
// gradients add up over windows as under torch's DDP.
class Shard {
 public:
  // `holders`: by span, the optimizer's tensors. `notices`: by member of the bucket.
  Shard(const Sharding& sharding, size_t bucket, std::vector<at::Tensor> holders, std::vector<at::Tensor> notices);

  // This rank's spans, in their places in the bucket's wire.
  const Spans& mine() const { return mine_; }
  // The same with gradients to write: makes memory where there is none.
  const Spans& mine_to_write();

  // If this bucket is sharded: if the member's gradient is a notice, takes it away, so that autograd can write a gradient.
  static void take_notice(Bucket& bucket, size_t member);

  // The ranks' sums are in this rank's run of `wire`. Makes them the spans' gradients, and finishes.
  void take(Bucket& bucket, const at::Tensor& wire);
  // The gradient of the member's span is this window's. Leaves the notice in its place.
  void finish(Bucket& bucket, size_t member);
  // The same for all members without a placeholder.
  void finish(Bucket& bucket);
  // The window has brought nothing for the member, on any rank.
  void restore(Bucket& bucket, size_t member);
  // Adds this rank's part of `whole`, which has all numbers of the bucket's member.
  void add(Bucket& bucket, size_t member, const at::Tensor& whole);
  // The span's gradient, if `gradient` is the notice; else `gradient`. Undefined: the span is another rank's.
  at::Tensor own_gradient(size_t member, const at::Tensor& gradient) const {
    if (!gradient.defined() || !is_notice(member, gradient)) return gradient;
    return span_of_[member] ? held(*span_of_[member]) : at::Tensor();
  }
  // A window has failed: gradients become zero.
  void zero();

 private:
  bool is_notice(size_t member, const at::Tensor& gradient) const { return gradient.is_same(notices_[member]); }
  at::Tensor& held(size_t span) const { return holders_[span].mutable_grad(); }
  // Of a gradient of this window.
  void leave_notice(size_t member, at::Tensor& gradient);
  // What was taken back has been removed since; `is_zero`: it has become zero.
  void forget(size_t member, bool is_zero = false);
  at::Tensor take_kept(size_t span);

  Spans mine_;
  const std::vector<at::Tensor> holders_;       // by span
  const std::vector<at::Tensor> notices_;       // by member
  std::vector<std::optional<size_t>> span_of_;  // by member
  std::vector<bool> taken_back_;                // by member: its notice
  std::vector<at::Tensor> kept_;                // by span: what is added to the coming average; undefined: nothing
  const std::unique_ptr<Kernels> kernels_;
  at::Tensor bound_;  // the wire whose parts the gradients are
};

}  // namespace fastddp
