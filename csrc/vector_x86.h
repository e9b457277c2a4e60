// The vector loop of kernels_cpu.cpp for x86-64: eight elements at a time with AVX2 and F16C, chosen at run time, so
// that the extension is built for the baseline CPU and still runs at the speed of memory on today's.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#define FASTDDP_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace fastddp {

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

FASTDDP_AVX2 inline void store8(float* p, __m256 x) {
  _mm256_storeu_ps(p, x);
}
FASTDDP_AVX2 inline void store8(c10::Half* p, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// Round to nearest even by adding half of the last kept bit, and the bit itself; a NaN becomes the one quiet NaN that
// c10::BFloat16 makes of it, which adding could turn into an infinity.
FASTDDP_AVX2 inline void store8(c10::BFloat16* p, __m256 x) {
  const auto bits = _mm256_castps_si256(x);
  const auto last_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const auto rounding = _mm256_add_epi32(last_kept, _mm256_set1_epi32(0x7fff));
  auto high = _mm256_srli_epi32(_mm256_add_epi32(bits, rounding), 16);
  const auto is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), is_nan);
  const auto packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

template <typename Source, typename Destination>
FASTDDP_AVX2 int64_t convert_avx2(const Source* source, Destination* destination, int64_t count, float scale) {
  const auto factor = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    store8(destination + i, _mm256_mul_ps(load8(source + i), factor));
  }
  return i;
}

// Converts as many leading elements as fill whole vectors and returns their number; the caller does the rest.
template <typename Source, typename Destination>
int64_t vector_convert(const Source* source, Destination* destination, int64_t count, float scale) {
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return supported ? convert_avx2(source, destination, count, scale) : 0;
}

#else

template <typename Source, typename Destination>
int64_t vector_convert(const Source*, Destination*, int64_t, float) {
  return 0;
}

#endif

}  // namespace fastddp
