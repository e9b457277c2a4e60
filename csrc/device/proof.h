// The first call of a kernel: note [A kernel proves itself where it first runs], compiled_kernels.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <vector>

#include "device/compiled_kernels.h"

namespace fastddp {

// What a call writes.
struct Written {
  std::vector<at::Tensor> in_place;  // the call may read what was there
  std::vector<at::Tensor> fresh;     // the call does not read what was there
  at::Tensor sums;                   // [..., 2]: pairs, compared by their totals; not read by the call; undefined: none
};

// One tensor: before the call (zeros where it is fresh), and as the kernel and torch's operators have written it.
struct Compared {
  at::Tensor before, kernel, operators;
};

struct Judge {
  at::Tensor (*wrong)(const Compared&);  // a mask of the kernel's wrong elements, on the device
  // Whether both must write the same bits. If not, a proven kernel's result stays, as on ranks that have proven it before.
  bool exact;
};
at::Tensor other_bits(const Compared& compared);  // except where both are NaN
// Elements further apart than rounding explains, relative to the largest element before or after.
at::Tensor beyond_rounding(const Compared& compared);
constexpr Judge kSameBits{other_bits, true};
constexpr Judge kToRounding{beyond_rounding, false};

// Does `launch` by `kernels`, all of which are on one device, then `operators`, and compares. The host waits for the current
// stream. If it may not wait (a captured graph), if there is no memory for a copy of what is written, or if all numbers are zero
// or some are not finite, then nothing is proven, and operators have done the work.
void prove(const std::vector<const LoadedKernel*>& kernels, const Written& written, const std::function<void()>& launch,
           const std::function<void()>& operators, const Judge& judge);
void give_up(const std::vector<const LoadedKernel*>& kernels, const LaunchError& error);

// Does the work, by `launch` or by `operators`. `written()` returns what that writes.
template <typename WrittenBy, typename Launch, typename Operators>
void run_trusted(std::initializer_list<const LoadedKernel*> kernels, const WrittenBy& written, const Launch& launch,
                 const Operators& operators, const Judge& judge = kSameBits) {
  const auto is_proven = [](const LoadedKernel* kernel) { return kernel->trust == Trust::proven; };
  if (!std::ranges::all_of(kernels, is_proven)) return prove(kernels, written(), launch, operators, judge);
  try {
    return launch();
  } catch (const LaunchError& error) {
    give_up(kernels, error);
  }
  operators();
}

}  // namespace fastddp
