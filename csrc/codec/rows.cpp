#include "codec/rows.h"

#include <ATen/ops/empty.h>

#include "bucket/gradient_memory.h"
#include "pack/kernels.h"

namespace fastddp {

at::Tensor Rows::row_of(const Span& span, c10::ScalarType dtype) {
  const auto& gradient = span.gradient;
  if (gradient.defined() && gradient.scalar_type() == dtype && same_dense_layout(gradient, span.like)) {
    return gradient.as_strided({gradient.numel()}, {1});
  }
  const auto row = at::empty({span.length()}, at::TensorOptions().dtype(dtype).device(span.like.device()));
  if (gradient.defined()) copies_.emplace_back(gradient, view_of(row, span.like, 0));
  return row;
}

at::Tensor Rows::to_read(const Span& span, c10::ScalarType dtype) {
  const auto known = copies_.size();
  const auto row = row_of(span, dtype);
  if (copies_.size() > known) copies_.back().second.copy_(span.gradient);
  if (!span.gradient.defined()) row.zero_();
  return row;
}

at::Tensor Rows::to_write(const Span& span, c10::ScalarType dtype) {
  return row_of(span, dtype);
}

}  // namespace fastddp
