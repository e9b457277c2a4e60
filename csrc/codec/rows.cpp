#include "codec/rows.h"

#include <ATen/ops/empty.h>

#include "bucket/gradient_memory.h"
#include "pack/kernels.h"

namespace fastddp {

at::Tensor Rows::of(const Span& span, c10::ScalarType dtype, bool is_read) {
  const auto& gradient = span.gradient;
  if (gradient.defined() && gradient.scalar_type() == dtype && same_dense_layout(gradient, span.like)) {
    return gradient.as_strided({gradient.numel()}, {1});
  }
  const auto row = at::empty({span.length()}, at::TensorOptions().dtype(dtype).device(span.like.device()));
  if (!gradient.defined()) return is_read ? row.zero_() : row;
  copies_.emplace_back(gradient, view_of(row, span.like, 0));
  if (is_read) copies_.back().second.copy_(gradient);
  return row;
}

void Rows::write_back() const {
  for (const auto& [gradient, copy] : copies_) gradient.copy_(copy);
}

}  // namespace fastddp
