// Sums over a vector of gradients: its squares, and how many elements are not finite.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "device/vector_x86.h"

namespace fastddp {

struct Measured {
  double sum_of_squares = 0;
  int64_t not_finite = 0;

  Measured& operator+=(const Measured& other) {
    sum_of_squares += other.sum_of_squares;
    not_finite += other.not_finite;
    return *this;
  }
};

// As Kernels::measure() returns the two sums; kernels_cpu.cpp.
at::Tensor as_tensor(const Measured& measured);

// For a few thousand elements at a time (see vector_measure).
template <typename Source>
Measured measure_values(const Source* source, int64_t count) {
  Measured measured;
  int64_t i = 0;
  if constexpr (!std::is_same_v<Source, double>) {
    i = vector_measure(source, count, measured.sum_of_squares, measured.not_finite);
  }
  for (; i < count; ++i) {
    const auto value = static_cast<double>(source[i]);
    measured.sum_of_squares += value * value;
    measured.not_finite += !std::isfinite(value);
  }
  return measured;
}

// The same, and right where squares do not fit in fp32 or an element is not finite.
template <typename Source>
Measured measure_block(const Source* source, int64_t count) {
  auto measured = measure_values(source, count);
  if (std::isfinite(measured.sum_of_squares)) return measured;
  measured = {};
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(source[i]);
    measured += {value * value, !std::isfinite(value)};
  }
  return measured;
}

// Adds up parts that threads find in any order. It adds in the order of their addresses, each time to the same bits.
class SumInOrder {
 public:
  void add(const void* address, const Measured& part, size_t member = 0) {
    const std::lock_guard lock(mutex_);
    parts_[{address, member}] += part;
  }

  Measured total() const {
    Measured all;
    for (const auto& [place, part] : parts_) all += part;
    return all;
  }

  using Parts = std::map<std::pair<const void*, size_t>, Measured>;  // by address and member of a bucket
  const Parts& parts() const { return parts_; }

 private:
  std::mutex mutex_;
  Parts parts_;
};

}  // namespace fastddp
