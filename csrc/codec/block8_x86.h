// The two loops over bytes of 8 that the compiler makes no good vectors of, for processors with 512-bit ones: decode, and the sum of shards.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <vector>

#include "codec/block8_numbers.h"
#include "device/vector_x86.h"

#if defined(__x86_64__)

namespace fastddp {

// Sixteen bytes as fp32, in units of kUnit. The processor makes fp32 of floats of 16 bits, also of those below the least normal
// one, so floats of 8 bits first become such: a sign, five bits of exponent, ten of mantissa.
template <typename Number>
struct Sixteen;

template <>
struct Sixteen<Int8> {
  static constexpr float kUnit = 1.0f;
  FASTDDP_AVX512 static __m512 of(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
};

template <>
struct Sixteen<E4m3> {
  static constexpr float kUnit = 256.0f;  // 2^(15 - 7), by the biases of exponents
  FASTDDP_AVX512 static __m512 of(__m128i bytes) {
    const auto words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // with the sign in both of the highest bits
    return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
  }
};

template <>
struct Sixteen<E5m2> {
  static constexpr float kUnit = 1.0f;
  FASTDDP_AVX512 static __m512 of(__m128i bytes) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 8));
  }
};

template <typename Number>
FASTDDP_AVX512 inline __m512 decode16(const uint8_t* bytes, __m512 scale) {
  return _mm512_mul_ps(Sixteen<Number>::of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))), scale);
}

// Rounds to the gradient's dtype and stores; returns what that is in fp32.
template <bool kStream>
FASTDDP_AVX512 inline __m512 store_rounded(float* p, __m512 x) {
  kStream ? _mm512_stream_ps(p, x) : _mm512_storeu_ps(p, x);
  return x;
}
template <bool kStream>
FASTDDP_AVX512 inline void store_words(void* p, __m256i words) {
  kStream ? _mm256_stream_si256(static_cast<__m256i*>(p), words) : _mm256_storeu_si256(static_cast<__m256i*>(p), words);
}
template <bool kStream>
FASTDDP_AVX512 inline __m512 store_rounded(c10::Half* p, __m512 x) {
  const auto words = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  store_words<kStream>(p, words);
  return _mm512_cvtph_ps(words);
}
template <bool kStream>
FASTDDP_AVX512 inline __m512 store_rounded(c10::BFloat16* p, __m512 x) {
  // To the nearest, ties to even, as round_up() does it. Adding could turn a NaN into an infinity.
  const auto bits = _mm512_castps_si512(x);
  const auto last_kept = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  auto rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last_kept, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  store_words<kStream>(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}

// `count` elements, a multiple of 16. Returns the sum of the squares of what it stores.
template <typename Number, bool kStream, typename Value>
FASTDDP_AVX512 inline double decode_avx512(const CodedBlock& block, Value* values, int64_t count) {
  const auto factor = _mm512_set1_ps(block.scale * Sixteen<Number>::kUnit);
  auto squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += 16) {
    const auto stored = store_rounded<kStream>(values + i, decode16<Number>(block.bytes + i, factor));
    squares = _mm512_add_ps(squares, _mm512_mul_ps(stored, stored));
  }
  return _mm512_reduce_add_ps(squares);
}

// `count` elements, a multiple of 64. Returns the bits of the largest magnitude.
template <typename Number>
FASTDDP_AVX512 inline int32_t add_avx512(const std::vector<CodedBlock>& shards, float* sums, int64_t count) {
  constexpr int64_t vectors = 4;  // whose sums stay in registers
  auto most = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16 * vectors) {
    __m512 sum[vectors] = {};
    for (const auto& [bytes, scale] : shards) {
      const auto factor = _mm512_set1_ps(scale * Sixteen<Number>::kUnit);
#pragma GCC unroll 4
      for (int64_t j = 0; j < vectors; ++j) {
        sum[j] = _mm512_add_ps(sum[j], decode16<Number>(bytes + i + 16 * j, factor));
      }
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < vectors; ++j) {
      _mm512_storeu_ps(sums + i + 16 * j, sum[j]);
      const auto magnitude = _mm512_and_si512(_mm512_castps_si512(sum[j]), _mm512_set1_epi32(0x7fffffff));
      most = _mm512_max_epi32(most, magnitude);
    }
  }
  return _mm512_reduce_max_epi32(most);
}

}  // namespace fastddp

#endif
