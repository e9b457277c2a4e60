// Where one gradient's elements are: in a wire, or in memory of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastddp {

// Note [Main gradients]
// A 16-bit gradient loses what is added to it: 256 + 1 is 256 in bf16. So gradients of 16-bit parameters may be fp32
// (`of_16_bits`), and microbatches and ranks add up in fp32. There are two places for such a gradient:
// - `parameter.grad`. Torch lets a gradient have another dtype than its parameter (Tensor.grad_dtype). Autograd casts what it
//   computes and adds it up there.
// - A separate tensor (`in_main_grad`), which Python calls `parameter.main_grad`. Autograd leaves what it computes in
//   `parameter.grad`; the hook adds that to the main gradient and frees it. A main gradient is always defined, and is the same
//   tensor as long as there are buckets. So buckets treat it like a gradient that others hold. When buckets are rebuilt, they
//   change its memory, never the tensor. Whoever keeps a view of it sees what the next window writes.
// Both live in the wire from the first microbatch on, if the wire has their dtype. Microbatches add up right there, and there is
// no second copy of all gradients. Where something else travels (16 bits, factors), gradients have memory of their own.
struct GradientForm {
  bool as_bucket_view = false;  // note [Where gradients live], bucket.h
  std::optional<c10::ScalarType> of_16_bits;
  bool in_main_grad = false;
  bool lazy_bucket_allocation = false;  // note [Lent wires], wire.h

  c10::ScalarType dtype_of(const at::Tensor& parameter) const {
    const auto own = parameter.scalar_type();
    return at::isReducedFloatingType(own) ? of_16_bits.value_or(own) : own;
  }
};

// The parameter's elements in `wire`, from the wire's element `offset` on, in the layout that autograd gives the gradient: the
// parameter's strides if it is dense and non-overlapping, else row-major (see "Gradient Layout Contract" in torch's
// accumulate_grad.h).
at::Tensor view_of(const at::Tensor& wire, const at::Tensor& parameter, size_t offset);
// Fresh memory in that layout.
at::Tensor empty_gradient(const at::Tensor& parameter, c10::ScalarType dtype);

// Call before a write to a gradient that goes past autograd: tells those who saved the gradient that it changes.
void bump_version(const at::Tensor& gradient);
// The same, and keeps the gradient's memory for the current stream.
const at::Tensor& about_to_write(const at::Tensor& gradient);

// Whether `gradient` is at its place in the wire, `view`.
bool lives_in(const at::Tensor& view, const at::Tensor& gradient);
// Whether `gradient` has the dtype and layout to live at `view`.
bool fits(const at::Tensor& gradient, const at::Tensor& view);

// The wire's memory as a gradient like any other. To autograd it is no view, so it can be detached in place.
at::Tensor as_gradient(const at::Tensor& view);

// Gives `gradient` the memory of `other`. It stays the same tensor for whoever holds it.
void take_memory_of(const at::Tensor& gradient, const at::Tensor& other);

}  // namespace fastddp
