// The kernels from torch's own operators: right on every device and for every layout, two launches a gradient.
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>

#include "pack/kernels.h"

namespace fastddp {
namespace {

// A zero-dimensional fp64 tensor takes no part in type promotion, and kernels read it in their compute type: fp32 for
// fp16 and bf16.
at::Tensor scaling_factor(double scale) {
  auto factor = at::scalar_tensor(scale, at::kDouble);
  factor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return factor;
}

class AtenKernels : public Kernels {
 public:
  void pack(const std::vector<Slot>& slots, double scale, size_t, LocalSums* sums) override {
    if (sums != nullptr) measure_with_operators(slots, *sums);
    pack_with_operators(slots, scale);
  }

  at::Tensor unpack(const std::vector<Slot>& slots, bool) override {
    unpack_with_operators(slots);
    return {};
  }
};

}  // namespace

void pack_with_operators(const std::vector<Slot>& slots, double scale) {
  for (const auto& [gradient, view, member] : slots) {
    const c10::OptionalDeviceGuard guard(view.device());
    if (!gradient.defined()) {
      view.zero_();
    } else if (scale == 1.0) {
      if (!gradient.is_same(view)) view.copy_(gradient);
    } else {
      auto destination = view;
      // The operator rounds to the gradient's dtype, then to the wire's. A cast of 16 bits rounds once, from fp32.
      const auto dtype = gradient.scalar_type();
      const bool is_cast = at::isReducedFloatingType(dtype) && view.scalar_type() != dtype;
      at::mul_out(destination, is_cast ? gradient.to(at::kFloat) : gradient, scaling_factor(scale));
    }
  }
}

void unpack_with_operators(const std::vector<Slot>& slots) {
  for (const auto& [gradient, view, member] : slots) {
    const c10::OptionalDeviceGuard guard(view.device());
    if (gradient.defined()) gradient.copy_(view);
  }
}

at::Tensor measure_with_operators(const at::Tensor& values) {
  const c10::OptionalDeviceGuard guard(values.device());
  const auto norm = at::linalg_vector_norm(values, 2, std::nullopt, false, at::kDouble);
  return at::stack({norm.square(), at::isfinite(values).logical_not().sum().to(at::kDouble)});
}

void measure_with_operators(const std::vector<Slot>& slots, LocalSums& sums) {
  for (const auto& [gradient, view, member] : slots) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto values = gradient.is_complex() ? at::view_as_real(gradient.resolve_conj()) : gradient;
    const auto pair = measure_with_operators(values);
    if (gradient.is_cpu()) {
      sums.add(member, {pair[0].item<double>(), static_cast<int64_t>(pair[1].item<double>())});
    } else {
      sums.take_rows({{member, 1}}).copy_(pair.unsqueeze(0));
    }
  }
}

at::Tensor add_up(const at::Tensor& partial_results) {
  return partial_results.view({-1, 2}).sum(0, /*keepdim=*/false, at::kDouble);
}

std::unique_ptr<Kernels> make_aten_kernels() {
  return std::make_unique<AtenKernels>();
}

bool same_dense_layout(const at::Tensor& gradient, const at::Tensor& view) {
  if (gradient.sizes() != view.sizes()) return false;
  // The memory of a lazily conjugated or negated tensor does not hold its values.
  if (gradient.is_conj() != view.is_conj() || gradient.is_neg() != view.is_neg()) return false;
  if (gradient.is_contiguous() && view.is_contiguous()) return true;
  return gradient.strides() == view.strides() && view.is_non_overlapping_and_dense();
}

}  // namespace fastddp
