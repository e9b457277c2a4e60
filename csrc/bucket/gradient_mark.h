// Whether a gradient still holds what it held.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastddp {

// Whether the gradient is there and not all of its numbers are zero. The host waits for its device.
bool holds_anything(const at::Tensor& gradient);

// Note [What a gradient still holds]
// Users remove gradients in many ways (None, zeros written in place, zeros in another tensor), and none of them tells us. So a
// mark remembers a gradient's tensor and version. As long as both are the same, the gradient holds what it held. If not, its
// numbers tell: where all are zero it was removed, and anything else (clipping, say) has changed it.
class GradientMark {
 public:
  GradientMark() = default;
  explicit GradientMark(const at::Tensor& gradient) { set(gradient); }
  // Undefined: nothing is marked.
  void set(const at::Tensor& gradient);
  // Whether nobody has replaced it or written to it, past us or by us.
  bool is_untouched(const at::Tensor& gradient) const;
  // True if nothing was marked and there is a gradient. If somebody has written to it, the host waits for its device.
  bool still_holds(const at::Tensor& gradient) const {
    if (!gradient.defined()) return false;
    const bool is_marked = tensor_._unsafe_get_target() != c10::UndefinedTensorImpl::singleton();
    return !is_marked || is_untouched(gradient) || holds_anything(gradient);
  }

 private:
  // Keeps the address from being another tensor's.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_{at::Tensor().getIntrusivePtr()};
  uint32_t version_ = 0;
};

}  // namespace fastddp
