#include "reducer/local_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "bucket/measuring.h"
#include "reducer/closing.h"

namespace fastddp {
namespace {

double largest(c10::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kHalf:
      return std::numeric_limits<c10::Half>::max();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::max();
    case at::kDouble:
      return std::numeric_limits<double>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

// As Kernels::measure().
at::Tensor measure_flat(const at::Tensor& values) {
  const auto real = values.is_complex() ? at::view_as_real(values.resolve_conj()) : values;
  return add_up(make_kernels(real.device())->measure(real.contiguous().view(-1)));
}

// What measure_flat() has returned, on the CPU.
Measured read_pair(const at::Tensor& pair) {
  const auto* const numbers = pair.const_data_ptr<double>();
  return {numbers[0], static_cast<int64_t>(numbers[1])};
}

}  // namespace

void LocalGradients::watch(bool watching) {
  TORCH_CHECK(!window_.is_open() && !window_.is(WindowState::failed),
              "fastddp: gradients can begin to be measured, or cease to be, between two windows only, not while one is ",
              to_string(window_.state()));
  buckets_.set_measure_locally(watching);
}

void LocalGradients::notice_now(const Noticed& noticed) {
  noticed_ = noticed;
  if (has_streams(buckets_.device())) return;
  const auto& parameters = buckets_.parameters();
  const auto counts = at::zeros({static_cast<int64_t>(parameters.size())}, at::kLong);
  for (size_t parameter = 0; parameter < parameters.size(); ++parameter) {
    const auto gradient = buckets_.own_gradient(parameter);
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto pair = measure_flat(gradient.is_sparse() ? gradient.coalesce().values() : gradient);
    counts.mutable_data_ptr<int64_t>()[parameter] = read_pair(pair.cpu()).not_finite;
  }
  synchronised_ = counts;
}

void LocalGradients::measure(size_t parameter, const at::Tensor& gradient) {
  if (gradient.defined() && gradient.numel() > 0) beside_.emplace_back(parameter, measure_flat(gradient));
}

void LocalGradients::measure_beside_buckets() {
  if (!are_watched()) return;
  for (const auto parameter : buckets_.sparse()) {
    const auto& gradient = buckets_.gradient(parameter);
    if (gradient.defined() && gradient.is_sparse()) measure(parameter, gradient._values());
  }
  for (const auto& bucket : buckets_.all()) {
    for (size_t member = 0; member < bucket.size(); ++member) {
      if (bucket.window[member].has_placeholder()) measure(bucket.layout.parameter(member), left_out(bucket, member));
    }
  }
}

double LocalGradients::too_large(size_t parameter) const {
  const auto dtype = buckets_.gradient_dtype(parameter);
  return std::sqrt(std::max<double>(largest(dtype), std::numeric_limits<float>::max()));
}

bool LocalGradients::may_spoil_a_sum(int ranks) const {
  const auto may = [&](const Measured& of, size_t parameter) {
    const auto most = largest(buckets_.gradient_dtype(parameter)) / ranks;
    return of.not_finite > 0 || !(std::sqrt(of.sum_of_squares) < std::min(most, too_large(parameter)));
  };
  for (const auto& bucket : buckets_.all()) {
    const auto& sums = bucket.local_sums->on_host();
    for (size_t member = 0; member < sums.size(); ++member) {
      if (may(sums[member], bucket.layout.parameter(member))) return true;
    }
  }
  return std::ranges::any_of(beside_, [&](const auto& one) {
    const auto& [parameter, pair] = one;
    return pair.is_cpu() && may(read_pair(pair), parameter);
  });
}

// On the CPU we see while writing a result whether it is finite. We do not ask other ranks about it, though most results are the
// same on all: if a bit flipped on the way to this rank, the others have not noticed. The result of a hook may differ, too.
void LocalGradients::judge(size_t window, int ranks, const Closing& closing, const Way& way) {
  if (!are_watched()) return;
  const auto said = closing.some_are_not_finite();
  const bool alone = ranks == 1;
  if (said ? *said : may_spoil_a_sum(ranks)) return notice_now({window, said || alone, /*in_result=*/false});
  const bool comes_from_sums = (said || alone) && way.hook == nullptr;
  if (comes_from_sums && std::ranges::any_of(buckets_.all(), has_seen_not_finite))
    notice_now({window, alone, /*in_result=*/true});
}

void LocalGradients::notice_late(Closing& closing) {
  if (!are_watched()) return;
  if (const auto late = closing.take_late_not_finite()) noticed_ = {*late, /*by_all=*/false, /*in_result=*/false};
}

at::Tensor LocalGradients::not_finite_count() const {
  const auto device = buckets_.device();
  std::vector<at::Tensor> counts;
  for (const auto& [of_rows, rows] : buckets_.measured_rows()) {
    const auto count = rows->not_finite();
    if (count.defined()) counts.push_back(count.to(device));
  }
  for (const auto& [parameter, pair] : beside_) {
    if (!pair.is_cpu()) counts.push_back(pair.select(0, 1).to(device));
  }
  if (counts.size() == 1) return counts.front();
  return counts.empty() ? at::Tensor() : at::stack(counts).sum();
}

at::Tensor LocalGradients::read() const {
  TORCH_CHECK(are_watched() && window_.is(WindowState::finished),
              "fastddp: what gradients were on this rank is known, where they are measured, between the backward that "
              "synchronises them and the next forward, not while the window is ",
              to_string(window_.state()), ".");
  std::vector<Measured> all(buckets_.parameters().size());
  std::unordered_map<c10::Device, at::Tensor> rows_on_host;
  for (const auto& [device, rows] : buckets_.measured_rows()) rows_on_host[device] = rows->on_host();
  for (const auto& bucket : buckets_.all()) {
    const auto sums = bucket.local_sums->read(rows_on_host[bucket.device()]);
    for (size_t member = 0; member < sums.size(); ++member) all[bucket.layout.parameter(member)] += sums[member];
  }
  for (const auto& [parameter, pair] : beside_) all[parameter] += read_pair(pair.cpu());
  const auto table = at::empty({static_cast<int64_t>(all.size()), 2}, at::kDouble);
  auto* next = table.mutable_data_ptr<double>();
  for (const auto& [sum_of_squares, not_finite] : all) {
    *next++ = sum_of_squares;
    *next++ = static_cast<double>(not_finite);
  }
  return table;
}

}  // namespace fastddp
