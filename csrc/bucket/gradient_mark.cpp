#include "bucket/gradient_mark.h"

namespace fastddp {

void GradientMark::set(const at::Tensor& gradient) {
  if (tensor_._unsafe_get_target() != gradient.unsafeGetTensorImpl()) {
    tensor_ = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(gradient.getIntrusivePtr());
  }
  version_ = !gradient.defined() || gradient.is_inference() ? 0 : static_cast<uint32_t>(gradient._version());
}

bool GradientMark::is_untouched(const at::Tensor& gradient) const {
  const GradientMark now(gradient);
  return now.tensor_ == tensor_ && now.version_ == version_;
}

bool holds_anything(const at::Tensor& gradient) {
  if (!gradient.defined()) return false;
  return gradient.is_sparse() ? gradient._nnz() > 0 : gradient.any().item<bool>();
}

}  // namespace fastddp
