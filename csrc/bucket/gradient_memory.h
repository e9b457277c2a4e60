// Where one gradient's elements are: in a wire, or in memory of their own.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastddp {

// The parameter's elements in `wire`, from its element `offset` on, in the layout in which autograd makes the gradient: the
// parameter's strides if it is dense and non-overlapping, else row-major (see "Gradient Layout Contract" in torch's
// accumulate_grad.h).
at::Tensor view_of(const at::Tensor& wire, const at::Tensor& parameter, size_t offset);
// Fresh memory in that layout.
at::Tensor empty_gradient(const at::Tensor& parameter);

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
