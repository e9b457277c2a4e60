// The loops of low_rank_loops.h for x86-64, with vectors of 256 bits (AVX2, FMA and F16C) and of 512 (AVX-512), chosen at run
// time.
#pragma once

#include <cmath>
#include <type_traits>

#include "device/vector_x86.h"

namespace fastddp {

constexpr int64_t kColumnsAtOnce = 16;

#if defined(__x86_64__)

inline bool has_fma() {
  static const bool supported =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return supported;
}

inline bool has_fma_512() {
  static const bool supported = has_fma() && has_avx512();
  return supported;
}

namespace vectors_of_256 {

#define FASTDDP_TARGET __attribute__((target("avx2,fma,f16c")))

struct Sixteen {
  __m256 low, high;
};

FASTDDP_TARGET inline void fetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p) + 1024, _MM_HINT_T0);
}
FASTDDP_TARGET inline Sixteen zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
template <typename T>
FASTDDP_TARGET inline Sixteen load16(const T* p) {
  return {load8(p), load8(p + 8)};
}
FASTDDP_TARGET inline Sixteen broadcast(const float* p) {
  return {_mm256_broadcast_ss(p), _mm256_broadcast_ss(p)};
}
template <bool kStream, typename T>
FASTDDP_TARGET inline void store(T* p, Sixteen x) {
  store16<kStream>(p, x.low, x.high);
}
FASTDDP_TARGET inline Sixteen fma(Sixteen a, Sixteen b, Sixteen c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
FASTDDP_TARGET inline Sixteen add(Sixteen a, Sixteen b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
FASTDDP_TARGET inline Sixteen sub(Sixteen a, Sixteen b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
FASTDDP_TARGET inline __m256 low(Sixteen x) {
  return x.low;
}
FASTDDP_TARGET inline __m256 high(Sixteen x) {
  return x.high;
}
FASTDDP_TARGET inline __m256 finite_or_zero(__m256 x) {
  return _mm256_and_ps(x, _mm256_cmp_ps(_mm256_sub_ps(x, x), _mm256_setzero_ps(), _CMP_EQ_OQ));
}
FASTDDP_TARGET inline Sixteen finite_or_zero(Sixteen x) {
  return {finite_or_zero(x.low), finite_or_zero(x.high)};
}

#include "codec/low_rank_loops.h"

#undef FASTDDP_TARGET

}  // namespace vectors_of_256

namespace vectors_of_512 {

#define FASTDDP_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))

using Sixteen = __m512;

FASTDDP_TARGET inline void fetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p) + 1024, _MM_HINT_T0);
}
FASTDDP_TARGET inline Sixteen zero() {
  return _mm512_setzero_ps();
}
FASTDDP_TARGET inline Sixteen load16(const float* p) {
  return _mm512_loadu_ps(p);
}
template <typename T>
FASTDDP_TARGET inline Sixteen load16(const T* p) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(load8(p)), load8(p + 8), 1);
}
FASTDDP_TARGET inline Sixteen broadcast(const float* p) {
  return _mm512_set1_ps(*p);
}
FASTDDP_TARGET inline __m256 low(Sixteen x) {
  return _mm512_castps512_ps256(x);
}
FASTDDP_TARGET inline __m256 high(Sixteen x) {
  return _mm512_extractf32x8_ps(x, 1);
}
template <bool kStream, typename T>
FASTDDP_TARGET inline void store(T* p, Sixteen x) {
  if constexpr (!std::is_same_v<T, float>)
    return store16<kStream>(p, low(x), high(x));
  else if constexpr (kStream)
    return _mm512_stream_ps(p, x);
  else
    return _mm512_storeu_ps(p, x);
}
FASTDDP_TARGET inline Sixteen fma(Sixteen a, Sixteen b, Sixteen c) {
  return _mm512_fmadd_ps(a, b, c);
}
FASTDDP_TARGET inline Sixteen add(Sixteen a, Sixteen b) {
  return _mm512_add_ps(a, b);
}
FASTDDP_TARGET inline Sixteen sub(Sixteen a, Sixteen b) {
  return _mm512_sub_ps(a, b);
}
FASTDDP_TARGET inline Sixteen finite_or_zero(Sixteen x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_sub_ps(x, x), _mm512_setzero_ps(), _CMP_EQ_OQ), x);
}

#include "codec/low_rank_loops.h"

#undef FASTDDP_TARGET

}  // namespace vectors_of_512

#endif

}  // namespace fastddp
