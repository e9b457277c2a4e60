// The vector loops of kernels_cpu.cpp for x86-64: sixteen elements at a time, with AVX2 and F16C. They are chosen at run time. So
// the extension is built for the baseline CPU and still runs at the speed of memory on today's CPUs.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define FASTDDP_AVX2 __attribute__((target("avx2,f16c")))
#define FASTDDP_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")))
#endif

namespace fastddp {

constexpr int64_t kStreamFromBytes = 1 << 20;  // note [Stores past the caches]

#if defined(__x86_64__)

FASTDDP_AVX2 inline __m256 load8(const float* p) {
  return _mm256_loadu_ps(p);
}
FASTDDP_AVX2 inline __m256 load8(const c10::Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FASTDDP_AVX2 inline __m256 load8(const c10::BFloat16* p) {
  const auto bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

FASTDDP_AVX2 inline __m256i round16(const c10::Half*, __m256 x, __m256 y) {
  return _mm256_set_m128i(_mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Rounds to nearest even: adds 0x7fff and the last kept bit. The result is in the upper halves.
FASTDDP_AVX2 inline __m256i round_up(__m256 x) {
  const auto bits = _mm256_castps_si256(x);
  const auto last_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(last_kept, _mm256_set1_epi32(0x7fff)));
}
// That could turn a NaN into an infinity. So each NaN becomes the one quiet NaN that c10::BFloat16 makes of it.
FASTDDP_AVX2 inline __m256i round16(const c10::BFloat16*, __m256 x, __m256 y) {
  auto low = _mm256_srli_epi32(round_up(x), 16), high = _mm256_srli_epi32(round_up(y), 16);
  if (_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q)) != 0) {  // a NaN on either side
    const auto quiet_nan = _mm256_set1_epi32(0x7fc0);
    low = _mm256_blendv_epi8(low, quiet_nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    high = _mm256_blendv_epi8(high, quiet_nan, _mm256_castps_si256(_mm256_cmp_ps(y, y, _CMP_UNORD_Q)));
  }
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}

// Note [Stores past the caches]
// A store to a line that is not in cache reads the line first: half as much traffic again. Streaming stores leave that read out,
// and need aligned addresses. They are used where so much is written that it would not stay in cache anyway.
template <bool kStream>
FASTDDP_AVX2 inline void store16(float* p, __m256 x, __m256 y) {
  kStream ? _mm256_stream_ps(p, x) : _mm256_storeu_ps(p, x);
  kStream ? _mm256_stream_ps(p + 8, y) : _mm256_storeu_ps(p + 8, y);
}
template <bool kStream, typename Half>
FASTDDP_AVX2 inline void store16(Half* p, __m256 x, __m256 y) {
  const auto bits = round16(p, x, y);
  auto* const q = reinterpret_cast<__m256i*>(p);
  kStream ? _mm256_stream_si256(q, bits) : _mm256_storeu_si256(q, bits);
}
FASTDDP_AVX2 inline double sum8(__m256 x) {
  const auto pairs = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  const auto low = _mm_add_pd(_mm256_castpd256_pd128(pairs), _mm256_extractf128_pd(pairs, 1));
  return _mm_cvtsd_f64(_mm_add_sd(low, _mm_unpackhi_pd(low, low)));
}

// With kMeasure it also adds up the squares of what it reads, in fp32: for a few thousand elements at a time.
template <bool kStream, bool kMeasure, typename Source, typename Destination>
FASTDDP_AVX2 int64_t convert_avx2(const Source* source, Destination* destination, int64_t count, float scale, double& squares) {
  constexpr int64_t vector = 16, ahead = 1024 / sizeof(Source);  // hardware stops prefetching at each page
  const auto factor = _mm256_set1_ps(scale);
  auto low = _mm256_setzero_ps(), high = low;
  int64_t i = 0;
  for (; kStream && i < count && reinterpret_cast<uintptr_t>(destination + i) % 32 != 0; ++i) {
    const auto value = static_cast<float>(source[i]);
    destination[i] = static_cast<Destination>(value * scale);
    if constexpr (kMeasure) squares += static_cast<double>(value) * value;
  }
  for (; i + vector <= count; i += vector) {
    _mm_prefetch(reinterpret_cast<const char*>(source + i + ahead), _MM_HINT_T0);
    const auto x = load8(source + i), y = load8(source + i + 8);
    store16<kStream>(destination + i, _mm256_mul_ps(x, factor), _mm256_mul_ps(y, factor));
    if constexpr (kMeasure) {
      low = _mm256_add_ps(low, _mm256_mul_ps(x, x));
      high = _mm256_add_ps(high, _mm256_mul_ps(y, y));
    }
  }
  if constexpr (kMeasure) squares += sum8(low) + sum8(high);
  if (kStream) _mm_sfence();
  return i;
}

FASTDDP_AVX2 inline int64_t copy_avx2(const char* source, char* destination, int64_t bytes) {
  int64_t i = 0;
  for (; i < bytes && reinterpret_cast<uintptr_t>(destination + i) % 32 != 0; ++i) destination[i] = source[i];
  for (; i + 32 <= bytes; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
  }
  return i;
}

// Squares are added up in fp32, in sixteen sums, which is exact enough for the few thousand elements of a call.
template <typename Source>
FASTDDP_AVX2 int64_t measure_avx2(const Source* source, int64_t count, double& sum_of_squares, int64_t& not_finite) {
  auto low = _mm256_setzero_ps(), high = low;
  auto bad = _mm256_setzero_si256();
  const auto zero = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const auto x = load8(source + i), y = load8(source + i + 8);
    low = _mm256_add_ps(low, _mm256_mul_ps(x, x));
    high = _mm256_add_ps(high, _mm256_mul_ps(y, y));
    // x - x is 0 for finite numbers and NaN for all else; a lane that compares true is -1.
    bad = _mm256_sub_epi32(bad, _mm256_castps_si256(_mm256_cmp_ps(_mm256_sub_ps(x, x), zero, _CMP_NEQ_UQ)));
    bad = _mm256_sub_epi32(bad, _mm256_castps_si256(_mm256_cmp_ps(_mm256_sub_ps(y, y), zero, _CMP_NEQ_UQ)));
  }
  sum_of_squares += sum8(low) + sum8(high);
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), bad);
  for (const auto lane : lanes) not_finite += lane;
  return i;
}

template <typename Source>
FASTDDP_AVX2 int64_t add_avx2(const Source* values, float* sums, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(sums + i, _mm256_add_ps(_mm256_loadu_ps(sums + i), load8(values + i)));
  return i;
}

inline bool has_avx2() {
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return supported;
}

inline bool has_avx512() {
  static const bool supported = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return supported;
}

#endif

// Each vector_ function does as many leading elements as fill whole vectors, and returns their number. The caller does the rest.

// `squares`, if not null, gets those of the elements that it converts, before they are scaled, added to it.
template <typename Source, typename Destination>
int64_t vector_convert(const Source* source, Destination* destination, int64_t count, float scale, bool past_caches,
                       double* squares = nullptr) {
#if defined(__x86_64__)
  if (has_avx2()) {
    double unread = 0;
    if (squares == nullptr) {
      return past_caches ? convert_avx2<true, false>(source, destination, count, scale, unread)
                         : convert_avx2<false, false>(source, destination, count, scale, unread);
    }
    return past_caches ? convert_avx2<true, true>(source, destination, count, scale, *squares)
                       : convert_avx2<false, true>(source, destination, count, scale, *squares);
  }
#endif
  return 0;
}

// Call end_of_copies() before another thread may read what went past the caches.
inline void copy_bytes(const void* source, void* destination, int64_t bytes, bool past_caches) {
  const auto* const from = static_cast<const char*>(source);
  auto* const to = static_cast<char*>(destination);
  int64_t done = 0;
#if defined(__x86_64__)
  if (past_caches && has_avx2()) done = copy_avx2(from, to, bytes);
#endif
  std::memcpy(to + done, from + done, static_cast<size_t>(bytes - done));
}

inline void end_of_copies() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <typename Source>
int64_t vector_measure(const Source* source, int64_t count, double& sum_of_squares, int64_t& not_finite) {
#if defined(__x86_64__)
  if (has_avx2()) return measure_avx2(source, count, sum_of_squares, not_finite);
#endif
  return 0;
}

// sums += values.
template <typename Source>
int64_t vector_add(const Source* values, float* sums, int64_t count) {
#if defined(__x86_64__)
  if (has_avx2()) return add_avx2(values, sums, count);
#endif
  return 0;
}

}  // namespace fastddp
