#include "codec/flat_gradients.h"

#include <ATen/ops/empty.h>

#include "bucket/gradient_memory.h"
#include "pack/kernels.h"

namespace fastddp {

at::Tensor FlatGradients::of(Bucket& bucket, size_t member, c10::ScalarType dtype) {
  const auto& parameter = bucket.layout[member].like;
  auto& gradient = bucket.gradient(member);
  if (!gradient.defined()) gradient = bucket.layout.empty_gradient(member).zero_();
  if (gradient.scalar_type() == dtype && same_dense_layout(gradient, parameter)) {
    return gradient.as_strided({gradient.numel()}, {1});
  }
  const auto elements = bucket.layout.length(member);
  const auto flat = at::empty({elements}, at::TensorOptions().dtype(dtype).device(bucket.device()));
  copies_.push_back({gradient, view_of(flat, parameter, 0)});
  copies_.back().copy.copy_(gradient);
  return flat;
}

}  // namespace fastddp
