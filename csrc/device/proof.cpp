#include "device/proof.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>

#include <fstream>
#include <optional>

namespace fastddp {
namespace {

using Tensors = std::vector<at::Tensor>;

// Kernels add up squares in fp32, up to a few thousand at once.
constexpr double kOfSums = 1e-4;

// How far roundings add up in sums as long as matrices, relative to the largest element.
double rounding_of(c10::ScalarType dtype) {
  return dtype == at::kHalf ? 2e-3 : dtype == at::kBFloat16 ? 2e-2 : 2e-5;
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

at::Tensor bits(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kShort);
    case 4:
      return tensor.view(at::kInt);
    default:
      return tensor.view(at::kLong);
  }
}

at::Tensor largest(const at::Tensor& tensor) {
  return tensor.to(at::kDouble).abs().max();
}

at::Tensor wrong_sums(const at::Tensor& by_kernel, const at::Tensor& by_operators) {
  const auto added = [](const at::Tensor& pairs) { return pairs.view({-1, 2}).sum(0); };
  const auto ours = added(by_kernel), theirs = added(by_operators);
  return (ours - theirs).abs().le(theirs.abs() * kOfSums).logical_not();
}

// None if there is no memory for the copies.
std::optional<Tensors> copies(const Tensors& tensors) {
  try {
    Tensors made;
    for (const auto& tensor : tensors) made.push_back(tensor.clone());
    return made;
  } catch (const c10::OutOfMemoryError&) {
    return std::nullopt;
  }
}

void write(const Tensors& to, const Tensors& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

// False if all numbers are zero, or some are not finite: these would hide an error. One boolean on the device.
at::Tensor says_something(const Tensors& written) {
  Tensors finite, there;
  for (const auto& tensor : written) {
    finite.push_back(at::isfinite(as_real(tensor)).all());
    there.push_back(as_real(tensor).ne(0).any());
  }
  return at::stack(finite).all().logical_and(at::stack(there).any());
}

std::string what_is_wrong(const Tensors& masks, const Tensors& by_kernel, const Tensors& by_operators) {
  int64_t wrong = 0, all = 0;
  std::string first;
  for (size_t i = 0; i < masks.size(); ++i) {
    const auto places = masks[i].flatten().nonzero();
    wrong += places.size(0);
    all += masks[i].numel();
    if (places.size(0) == 0 || !first.empty()) continue;
    const auto value = [&](const at::Tensor& tensor) {
      const auto flat = as_real(tensor).flatten();
      return flat.numel() == masks[i].numel() ? flat[places[0].item<int64_t>()].item<double>() : 0.0;
    };
    first = c10::str(", the first is ", value(by_kernel[i]), " in place of ", value(by_operators[i]));
  }
  return c10::str("in its first call ", wrong, " of ", all, " numbers are not those of torch's operators", first);
}

void remember(const LoadedKernel& kernel) {
  auto untried = Trust::untried;
  kernel.trust.compare_exchange_strong(untried, Trust::proven);
  // If the file cannot be written, the next job tries the kernel again.
  if (!kernel.proof.empty()) std::ofstream(kernel.proof) << kernel.name << ", " << kernel.place << "\n";
}

void give_up(const std::vector<const LoadedKernel*>& kernels, const std::string& reason) {
  for (const auto* kernel : kernels) {
    const auto warning = note_given_up({kernel->device, kernel->name, kernel->place, reason});
    if (!warning.empty()) TORCH_WARN(warning);
  }
}

}  // namespace

at::Tensor other_bits(const Compared& compared) {
  const auto kernel = as_real(compared.kernel), operators = as_real(compared.operators);
  const auto others = bits(kernel).ne(bits(operators));
  return others.logical_and(at::isnan(kernel).logical_and(at::isnan(operators)).logical_not());
}

at::Tensor beyond_rounding(const Compared& compared) {
  const auto& [before, kernel, operators] = compared;
  if (kernel.numel() == 0) return at::zeros_like(kernel, at::kBool);
  const auto limit = at::maximum(largest(before), largest(operators)) * rounding_of(kernel.scalar_type());
  return (kernel.to(at::kDouble) - operators.to(at::kDouble)).abs().le(limit).logical_not();
}

void give_up(const std::vector<const LoadedKernel*>& kernels, const LaunchError& error) {
  give_up(kernels, error.what_without_backtrace());
}

void prove(const std::vector<const LoadedKernel*>& kernels, const Written& written, const std::function<void()>& launch,
           const std::function<void()>& operators, const Judge& judge) {
  const auto device = kernels.front()->device;
  if (is_capturing(device)) return operators();
  const c10::OptionalDeviceGuard guard(device);
  auto all = written.fresh;
  for (const auto& tensor : all) tensor.zero_();
  all.insert(all.end(), written.in_place.begin(), written.in_place.end());
  const auto count = all.size();
  if (written.sums.defined()) all.push_back(written.sums);

  const auto before = copies(all);
  if (!before) return operators();
  std::optional<std::string> refused;
  try {
    launch();
  } catch (const LaunchError& error) {
    refused = error.what_without_backtrace();
  }
  const auto by_kernel = copies(all);
  write(all, *before);
  operators();
  if (refused) return give_up(kernels, *refused);
  if (!by_kernel) return;

  Tensors masks;
  for (size_t i = 0; i < count; ++i) masks.push_back(judge.wrong({(*before)[i], (*by_kernel)[i], all[i]}));
  if (written.sums.defined()) masks.push_back(wrong_sums(by_kernel->back(), all.back()));
  Tensors any;
  for (const auto& mask : masks) any.push_back(mask.any());
  const auto verdict = at::stack({says_something(all), at::stack(any).any()}).cpu();
  if (!verdict[0].item<bool>()) return;
  if (verdict[1].item<bool>()) return give_up(kernels, what_is_wrong(masks, *by_kernel, all));
  if (!judge.exact) write(all, *by_kernel);
  for (const auto* kernel : kernels) remember(*kernel);
}

}  // namespace fastddp
