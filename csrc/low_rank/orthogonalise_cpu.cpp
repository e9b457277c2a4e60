#include "low_rank/orthogonalise_cpu.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace fastddp {
namespace {

constexpr double kDependent = 2e-7;  // of the norm; fp32 leaves less than this of a multiple of another vector

double dot(const double* a, const double* b, int64_t length) {
  constexpr int lanes = 8;  // independent sums, which the compiler can vectorise
  double sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= length; i += lanes) {
    for (int lane = 0; lane < lanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < length; ++i) sums[0] += a[i] * b[i];
  double sum = 0;
  for (const auto lane : sums) sum += lane;
  return sum;
}

// Twice: the first pass loses digits, and leaves as much of the earlier vectors in this one.
void remove_earlier(double* vector, const double* earlier, int64_t count, int64_t length) {
  for (int time = 0; time < 2; ++time) {
    for (int64_t other = 0; other < count; ++other) {
      const auto* direction = earlier + other * length;
      const auto share = dot(vector, direction, length);
      for (int64_t i = 0; i < length; ++i) vector[i] -= share * direction[i];
    }
  }
}

template <typename C>
void orthogonalise_values(const Basis& basis, double epsilon, std::optional<uint64_t> refill) {
  const auto length = basis.vectors.size(0), rank = basis.vectors.size(1);
  const auto step = basis.vectors.stride(0), vector_step = basis.vectors.stride(1);
  auto* values = basis.vectors.data_ptr<C>();
  std::vector<double> copy(length * rank);
  for (int64_t c = 0; c < rank; ++c) {
    auto* vector = copy.data() + c * length;
    for (int64_t i = 0; i < length; ++i) vector[i] = values[i * step + c * vector_step];
    const auto before = std::sqrt(dot(vector, vector, length));
    remove_earlier(vector, copy.data(), c, length);
    auto norm = std::sqrt(dot(vector, vector, length));
    const bool finite = std::isfinite(norm);
    if (finite ? norm <= std::max(epsilon, kDependent * before) : refill.has_value()) {
      for (int64_t i = 0; i < length; ++i) {
        vector[i] = refill.has_value() ? pseudo_random(seed_of(basis, *refill), c, i) : 0.0;
      }
      remove_earlier(vector, copy.data(), c, length);
      norm = std::sqrt(dot(vector, vector, length));
    }
    const auto factor = norm > 0 || std::isnan(norm) ? 1.0 / norm : 0.0;
    for (int64_t i = 0; i < length; ++i) {
      vector[i] *= factor;
      values[i * step + c * vector_step] = static_cast<C>(vector[i]);
    }
  }
}

}  // namespace

void orthogonalise_on_cpu(const Basis& basis, double epsilon, std::optional<uint64_t> refill) {
  basis.vectors.scalar_type() == at::kDouble ? orthogonalise_values<double>(basis, epsilon, refill)
                                             : orthogonalise_values<float>(basis, epsilon, refill);
}

}  // namespace fastddp
