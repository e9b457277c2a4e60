// The vector loops of kernels_cpu.cpp for x86-64 with AVX2, FMA and F16C, chosen at run time. Each loop does the columns
// that fill whole vectors and leaves the rest to its caller.
#pragma once

#include <cmath>
#include <type_traits>

#include "device/vector_x86.h"

namespace fastddp {

constexpr int64_t kColumnsAtOnce = 16;

inline bool has_fma() {
#if defined(__x86_64__)
  static const bool supported = has_avx2() && __builtin_cpu_supports("fma");
  return supported;
#else
  return false;
#endif
}

#if defined(__x86_64__)

#define FASTDDP_FMA __attribute__((target("avx2,fma,f16c")))

// Replaces numbers that are not finite by zero.
FASTDDP_FMA inline __m256 finite_or_zero(__m256 x) {
  return _mm256_and_ps(x, _mm256_cmp_ps(_mm256_sub_ps(x, x), _mm256_setzero_ps(), _CMP_EQ_OQ));
}

// Sixteen columns of one row.
struct Pair {
  __m256 low, high;
};

template <typename T>
FASTDDP_FMA inline Pair load16(const T* p) {
  return {load8(p), load8(p + 8)};
}

// memory = M = before + gradient. Returns M as it is stored: rounded to T.
template <bool kStream, typename T>
FASTDDP_FMA inline Pair write_sum(const T* gradient, const T* before, T* memory) {
  auto sum = load16(before);
  const auto other = load16(gradient);
  sum = {_mm256_add_ps(sum.low, other.low), _mm256_add_ps(sum.high, other.high)};
  store16<kStream>(memory, sum.low, sum.high);
  return std::is_same_v<T, float> ? sum : load16(memory);
}

// sums[c] += sum over the first `columns` (a multiple of 16) of M[j] * q[c][j] for R vectors of q. Writes M = before + gradient to
// `memory`. If that is null, M is the gradient.
template <int R, bool kStream, typename T>
FASTDDP_FMA void dot_rows(const T* gradient, const T* before, T* memory, const float* q, int64_t q_stride, int64_t columns,
                          float* sums) {
  __m256 low[R], high[R];
  for (int c = 0; c < R; ++c) low[c] = high[c] = _mm256_setzero_ps();
  const auto loop = [&](auto read) FASTDDP_FMA {
    for (int64_t j = 0; j < columns; j += kColumnsAtOnce) {
      const Pair m = read(j);
      for (int c = 0; c < R; ++c) {
        low[c] = _mm256_fmadd_ps(m.low, _mm256_loadu_ps(q + c * q_stride + j), low[c]);
        high[c] = _mm256_fmadd_ps(m.high, _mm256_loadu_ps(q + c * q_stride + j + 8), high[c]);
      }
    }
  };
  if (memory == nullptr) {
    loop([&](int64_t j) FASTDDP_FMA { return load16(gradient + j); });
  } else {
    loop([&](int64_t j) FASTDDP_FMA {
      _mm_prefetch(reinterpret_cast<const char*>(gradient + j) + 1024, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(before + j) + 1024, _MM_HINT_T0);
      return write_sum<kStream>(gradient + j, before + j, memory + j);
    });
  }
  for (int c = 0; c < R; ++c) sums[c] += static_cast<float>(sum8(_mm256_add_ps(low[c], high[c])));
}

// q[c][j] += sum over four rows i of p[i][c] * M[i][j]. Reads and writes the accumulators in q once for four rows.
template <int R, typename T>
FASTDDP_FMA void add_four_rows(const T* m, int64_t m_stride, const float* p, int64_t p_stride, int64_t columns, float* q,
                               int64_t q_stride) {
  for (int64_t j = 0; j < columns; j += kColumnsAtOnce) {
    Pair rows[4];
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(m + i * m_stride + j) + 1024, _MM_HINT_T0);
      rows[i] = load16(m + i * m_stride + j);
    }
    for (int c = 0; c < R; ++c) {
      auto sums = load16(q + c * q_stride + j);
      for (int i = 0; i < 4; ++i) {
        const auto factor = _mm256_broadcast_ss(p + i * p_stride + c);
        sums = {_mm256_fmadd_ps(factor, rows[i].low, sums.low), _mm256_fmadd_ps(factor, rows[i].high, sums.high)};
      }
      _mm256_storeu_ps(q + c * q_stride + j, sums.low);
      _mm256_storeu_ps(q + c * q_stride + j + 8, sums.high);
    }
  }
}

// gradient[j] = sum over c of p[c] * q[c][j], for all `rank` vectors; memory[j] -= gradient[j], if there is memory. Adds the
// gradient's squares to `sum_of_squares`, and counts its elements that are not finite.
template <int R, bool kStream, typename T>
FASTDDP_FMA void product_row(T* gradient, T* memory, const float* p, int rank, const float* q, int64_t q_stride,
                             int64_t columns, double& sum_of_squares, int64_t& not_finite) {
  const int vectors = R > 0 ? R : rank;
  const auto zero = _mm256_setzero_ps();
  Pair squares{zero, zero}, differences{zero, zero};  // a number minus itself: 0, or NaN if it is not finite
  for (int64_t j = 0; j < columns; j += kColumnsAtOnce) {
    Pair sum{zero, zero};
    for (int c = 0; c < vectors; ++c) {
      const auto factor = _mm256_broadcast_ss(p + c);
      const auto row = load16(q + c * q_stride + j);
      // Not fused: note [The same product on all ranks], kernels.h.
      sum = {_mm256_add_ps(sum.low, _mm256_mul_ps(factor, row.low)), _mm256_add_ps(sum.high, _mm256_mul_ps(factor, row.high))};
    }
    store16<kStream>(gradient + j, sum.low, sum.high);
    if constexpr (!std::is_same_v<T, float>) sum = load16(gradient + j);  // as rounded to T
    squares = {_mm256_fmadd_ps(sum.low, sum.low, squares.low), _mm256_fmadd_ps(sum.high, sum.high, squares.high)};
    differences = {_mm256_add_ps(differences.low, _mm256_sub_ps(sum.low, sum.low)),
                   _mm256_add_ps(differences.high, _mm256_sub_ps(sum.high, sum.high))};
    if (memory == nullptr) continue;
    _mm_prefetch(reinterpret_cast<const char*>(memory + j) + 1024, _MM_HINT_T0);
    const auto m = load16(memory + j);
    store16<false>(memory + j, finite_or_zero(_mm256_sub_ps(m.low, sum.low)), finite_or_zero(_mm256_sub_ps(m.high, sum.high)));
  }
  sum_of_squares += sum8(squares.low) + sum8(squares.high);
  const auto bad = _mm256_cmp_ps(_mm256_add_ps(differences.low, differences.high), zero, _CMP_NEQ_UQ);
  if (_mm256_movemask_ps(bad) == 0) return;
  for (int64_t j = 0; j < columns; ++j) not_finite += !std::isfinite(static_cast<float>(gradient[j]));
}

#endif

}  // namespace fastddp
