// A bucket: the gradients that travel together, and the wire they travel on.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "streams.h"

namespace fastddp {

struct Bucket {
  // Bucket `index` of `count`: the gradients of `members` one behind the other, without gaps. Members are indices into
  // `all_parameters` and `all_names`.
  Bucket(size_t index, size_t count, std::vector<size_t> members, const std::vector<at::Tensor>& all_parameters,
         const std::vector<std::string>& all_names, bool gradient_as_bucket_view);

  size_t index;                        // its place in the order of collectives
  size_t count;                        // of buckets in the plan
  std::vector<size_t> members;         // the parameters' indices in the reducer
  std::vector<at::Tensor> parameters;  // the parameters themselves
  std::vector<std::string> names;      // and what the user calls them
  bool gradient_as_bucket_view;        // `parameter.grad` is made a view of the wire

  // One-dimensional; the parameters' dtype, or the real dtype of the same precision where that is complex.
  at::Tensor wire;
  // Each gradient's elements in the wire, with sizes of the parameter, and its strides if it is dense.
  std::vector<at::Tensor> views;
  // The same in units of the wire's elements, in the form that c10d::GradBucket takes; complex numbers are pairs.
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<std::vector<int64_t>> sizes;

  size_t missing;            // gradients that have not come in this window
  std::vector<bool> packed;  // by member: its gradient is in the wire already
  Producers producers;       // the streams on which the others came

  void reset();
};

// Gradient -> wire for all members that are not packed yet: one kernel, scaled by `scale`; a parameter without a gradient
// contributes zeros. With gradient_as_bucket_view, `parameter.grad` then is its part of the wire. Runs on the current
// stream, after all producers.
void pack(Bucket& bucket, double scale);

// The same for one member as soon as its gradient is there, where that pays (note [When to pack], kernels.h).
void pack_on_arrival(Bucket& bucket, size_t member, double scale);

// Wire -> gradient: one kernel. `result` is the bucket's wire or a tensor laid out like it. With
// gradient_as_bucket_view, nothing moves when it is the wire itself.
void unpack(Bucket& bucket, const at::Tensor& result);

}  // namespace fastddp
