#include "bucket/gradient_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_complex.h>

#include "device/streams.h"
#include "pack/kernels.h"

namespace fastddp {

at::Tensor view_of(const at::Tensor& wire, const at::Tensor& parameter, size_t wire_offset) {
  const auto offset = static_cast<int64_t>(parameter.is_complex() ? wire_offset / 2 : wire_offset);
  const auto flat = parameter.is_complex() ? at::view_as_complex(wire.view({-1, 2})) : wire;
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides(), flat.storage_offset() + offset);
  }
  return flat.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

at::Tensor empty_gradient(const at::Tensor& parameter, c10::ScalarType dtype) {
  const auto options = parameter.options().requires_grad(false).dtype(dtype);
  return parameter.is_non_overlapping_and_dense() ? at::empty_strided(parameter.sizes(), parameter.strides(), options)
                                                  : at::empty(parameter.sizes(), options);
}

void bump_version(const at::Tensor& gradient) {
  gradient.unsafeGetTensorImpl()->bump_version();
}

const at::Tensor& about_to_write(const at::Tensor& gradient) {
  keep_for_current_stream(gradient);
  bump_version(gradient);
  return gradient;
}

bool lives_in(const at::Tensor& view, const at::Tensor& gradient) {
  return gradient.defined() && gradient.const_data_ptr() == view.const_data_ptr() && same_dense_layout(gradient, view);
}

at::Tensor as_gradient(const at::Tensor& view) {
  return at::Tensor(view.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                        /*allow_tensor_metadata_change=*/true));
}

void take_memory_of(const at::Tensor& gradient, const at::Tensor& other) {
  gradient.unsafeGetTensorImpl()->set_storage_keep_dtype(other.storage());
  gradient.unsafeGetTensorImpl()->set_storage_offset(other.storage_offset());
}

bool fits(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.scalar_type() == view.scalar_type() && same_dense_layout(gradient, view);
}

}  // namespace fastddp
