// Where one gradient's elements are: in a wire, or in memory of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastddp {

// Note [Main gradients]
// A gradient of 16 bits loses what is added to it: 256 + 1 is 256 in bf16. So gradients of parameters of 16 bits may be fp32
// (`of_16_bits`), and microbatches and ranks add up in fp32. There are two places for such a gradient:
// - `parameter.grad`, where torch lets gradients have another dtype than their parameter (Tensor.grad_dtype). Autograd casts
//   what it computes and adds it up there.
// - A tensor apart (`in_main_grad`), which Python calls `parameter.main_grad`. Autograd leaves what it computes in
//   `parameter.grad`; the hook adds it to the main gradient, and frees it. A main gradient is the same tensor for as long as there
//   are buckets, and always defined. So buckets treat it as they treat a gradient that others hold: they change its memory (when
//   buckets are rebuilt), never the tensor, and who keeps a view of it sees what the next window writes.
// Either way it lives in the wire from the first microbatch on, if the wire has its dtype: microbatches add up right there, and
// there is no second copy of all gradients. Where something else travels (16 bits, factors), it has memory of its own.
struct GradientForm {
  bool as_bucket_view = false;  // note [Where gradients live], bucket.h
  std::optional<c10::ScalarType> of_16_bits;
  bool in_main_grad = false;
  bool lends_wires = false;  // note [Lent wires], wire.h

  c10::ScalarType dtype_of(const at::Tensor& parameter) const;
};

// The parameter's elements in `wire`, from its element `offset` on, in the layout in which autograd makes the gradient: the
// parameter's strides if it is dense and non-overlapping, else row-major (see "Gradient Layout Contract" in torch's
// accumulate_grad.h).
at::Tensor view_of(const at::Tensor& wire, const at::Tensor& parameter, size_t offset);
// Fresh memory in that layout.
at::Tensor empty_gradient(const at::Tensor& parameter, c10::ScalarType dtype);

// Before a write to a gradient that goes past autograd: tells whoever saved it that it changes.
void bump_version(const at::Tensor& gradient);
// The same, and keeps its memory for the current stream.
const at::Tensor& about_to_write(const at::Tensor& gradient);

// Whether `gradient` is where the wire would have it, at `view`.
bool lives_in(const at::Tensor& view, const at::Tensor& gradient);
// Whether it could be there as it is.
bool fits(const at::Tensor& gradient, const at::Tensor& view);

// The wire's memory as a gradient that can be treated like any other: not a view to autograd, so that it can be detached
// in place.
at::Tensor as_gradient(const at::Tensor& view);

// Gives `gradient` the memory of another one. It stays the tensor that it is, for whoever holds it.
void take_memory_of(const at::Tensor& gradient, const at::Tensor& other);

}  // namespace fastddp
