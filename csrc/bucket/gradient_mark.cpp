#include "bucket/gradient_mark.h"

namespace fastddp {
namespace {

uint32_t version_of(const at::Tensor& gradient) {
  return gradient.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

void GradientMark::set(const at::Tensor& gradient) {
  if (tensor_._unsafe_get_target() != gradient.unsafeGetTensorImpl()) {
    tensor_ = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(gradient.getIntrusivePtr());
  }
  if (gradient.defined()) version_ = version_of(gradient);
}

bool GradientMark::still_holds(const at::Tensor& gradient) const {
  if (!gradient.defined()) return false;
  const auto* const marked = tensor_._unsafe_get_target();
  if (marked == c10::UndefinedTensorImpl::singleton()) return true;
  return (marked == gradient.unsafeGetTensorImpl() && version_ == version_of(gradient)) || holds_anything(gradient);
}

bool holds_anything(const at::Tensor& gradient) {
  if (!gradient.defined()) return false;
  return gradient.is_sparse() ? gradient._nnz() > 0 : gradient.any().item<bool>();
}

}  // namespace fastddp
