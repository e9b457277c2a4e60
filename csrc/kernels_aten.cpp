// The kernels from torch's own operators: right on every device and for every layout, two launches a gradient.
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DeviceGuard.h>

#include "kernels.h"

namespace fastddp {
namespace {

class AtenKernels : public Kernels {
 public:
  void pack(const std::vector<Slot>& slots, double scale) const override {
    for (const auto& [gradient, view] : slots) {
      const c10::OptionalDeviceGuard guard(view.device());
      if (!gradient.defined()) {
        view.zero_();
      } else if (scale == 1.0) {
        if (!gradient.is_same(view)) view.copy_(gradient);
      } else {
        auto destination = view;
        at::mul_out(destination, gradient, scaling_factor(scale));
      }
    }
  }

  void unpack(const std::vector<Slot>& slots) const override {
    for (const auto& [gradient, view] : slots) {
      const c10::OptionalDeviceGuard guard(view.device());
      gradient.copy_(view);
    }
  }

  bool pack_on_arrival() const override {
    return false;
  }

 private:
  // A zero-dimensional fp64 tensor takes no part in type promotion, and kernels read it in their compute type: fp32
  // for fp16 and bf16.
  static at::Tensor scaling_factor(double scale) {
    auto factor = at::scalar_tensor(scale, at::kDouble);
    factor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return factor;
  }
};

}  // namespace

const Kernels& aten_kernels() {
  static const AtenKernels kernels;
  return kernels;
}

const Kernels& kernels_for(c10::Device device) {
  return device.is_cpu() ? cpu_kernels() : aten_kernels();
}

bool same_dense_layout(const at::Tensor& gradient, const at::Tensor& view) {
  if (gradient.sizes() != view.sizes()) return false;
  if (gradient.is_contiguous() && view.is_contiguous()) return true;
  return gradient.strides() == view.strides() && view.is_non_overlapping_and_dense();
}

}  // namespace fastddp
