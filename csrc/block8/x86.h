// The two loops of block8 that the compiler vectorises badly: decode, and the sum of shards. For processors with 512-bit vectors,
// permutations of bytes and conversions to bf16.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "block8/numbers.h"
#include "device/vector_x86.h"

#if defined(__x86_64__)

#define FASTDDP_BYTES_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,f16c,prefer-vector-width=512")))

namespace fastddp {

inline bool has_bytes_avx512() {
  static const bool supported = has_avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
  return supported;
}

// The upper 16 bits of a byte's value in fp32, without its sign. The lower 16 bits are zero for every float of 8 bits.
template <typename Number>
struct UpperBytes {
  alignas(64) std::array<uint8_t, 128> highest{}, second{};

  constexpr UpperBytes() {
    for (size_t byte = 0; byte < highest.size(); ++byte) {
      const auto bits = std::bit_cast<uint32_t>(Number::value_of(static_cast<uint8_t>(byte)));
      highest[byte] = static_cast<uint8_t>(bits >> 24);
      second[byte] = static_cast<uint8_t>(bits >> 16);
    }
  }
};
template <typename Number>
constexpr UpperBytes<Number> kUpperBytes;

constexpr int64_t kDecoded = 64;  // numbers at a time, in four vectors

struct Decoded {
  __m512 of[4];
};

FASTDDP_BYTES_AVX512 inline __m512i look_up(const std::array<uint8_t, 128>& table, __m512i bytes) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table.data()), bytes, _mm512_load_si512(table.data() + 64));
}

template <typename Number>
FASTDDP_BYTES_AVX512 inline Decoded decode64(const uint8_t* bytes, __m512 scale) {
  // Unpacking puts a quarter of each 128 bits into the same vector. So we first move adjacent numbers into such quarters.
  const auto order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto all = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(bytes));
  const auto second = look_up(kUpperBytes<Number>.second, all);
  const auto unsigned_highest = look_up(kUpperBytes<Number>.highest, all);
  const auto highest = _mm512_or_si512(unsigned_highest, _mm512_and_si512(all, _mm512_set1_epi8(-128)));
  const auto zero = _mm512_setzero_si512();
  const auto low = _mm512_unpacklo_epi8(second, highest), high = _mm512_unpackhi_epi8(second, highest);
  const auto scaled = [&](__m512i bits) FASTDDP_BYTES_AVX512 { return _mm512_mul_ps(_mm512_castsi512_ps(bits), scale); };
  return {scaled(_mm512_unpacklo_epi16(zero, low)), scaled(_mm512_unpackhi_epi16(zero, low)),
          scaled(_mm512_unpacklo_epi16(zero, high)), scaled(_mm512_unpackhi_epi16(zero, high))};
}

template <>
FASTDDP_BYTES_AVX512 inline Decoded decode64<Int8>(const uint8_t* bytes, __m512 scale) {
  Decoded decoded;
#pragma GCC unroll 4
  for (int64_t i = 0; i < 4; ++i) {
    const auto sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * i));
    decoded.of[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen)), scale);
  }
  return decoded;
}

template <bool kStream>
FASTDDP_BYTES_AVX512 inline void store64(void* p, __m512i bits) {
  kStream ? _mm512_stream_si512(static_cast<__m512i*>(p), bits) : _mm512_storeu_si512(p, bits);
}

// Rounds to the gradient's dtype and stores. Returns `squares` plus the squares of the stored values.
template <bool kStream>
FASTDDP_BYTES_AVX512 inline __m512 store_rounded(float* p, const Decoded& x, __m512 squares) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < 4; ++i) {
    store64<kStream>(p + 16 * i, _mm512_castps_si512(x.of[i]));
    squares = _mm512_add_ps(squares, _mm512_mul_ps(x.of[i], x.of[i]));
  }
  return squares;
}
template <bool kStream>
FASTDDP_BYTES_AVX512 inline __m512 store_rounded(c10::Half* p, const Decoded& x, __m512 squares) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < 4; i += 2) {
    const auto low = _mm512_cvtps_ph(x.of[i], _MM_FROUND_TO_NEAREST_INT);
    const auto high = _mm512_cvtps_ph(x.of[i + 1], _MM_FROUND_TO_NEAREST_INT);
    store64<kStream>(p + 16 * i, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    const auto first = _mm512_cvtph_ps(low), second = _mm512_cvtph_ps(high);
    squares = _mm512_add_ps(squares, _mm512_mul_ps(first, first));
    squares = _mm512_add_ps(squares, _mm512_mul_ps(second, second));
  }
  return squares;
}
template <bool kStream>
FASTDDP_BYTES_AVX512 inline __m512 store_rounded(c10::BFloat16* p, const Decoded& x, __m512 squares) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < 4; i += 2) {
    const auto rounded = _mm512_cvtne2ps_pbh(x.of[i + 1], x.of[i]);
    store64<kStream>(p + 16 * i, std::bit_cast<__m512i>(rounded));
    squares = _mm512_dpbf16_ps(squares, rounded, rounded);
  }
  return squares;
}

// Whether a block with this scale has no NaN and no subnormal number: the processor converts those to other bf16 than c10 does.
inline bool has_usual_numbers(float scale) {
  return scale == 0 || (scale >= kLeastMagnitude && std::isfinite(scale));
}

// `count` elements, a multiple of kDecoded, of a block with usual numbers. Returns `squares` plus those of the stored values.
template <typename Number, bool kStream, typename Value>
FASTDDP_BYTES_AVX512 inline __m512 decode_avx512(const CodedBlock& block, Value* values, int64_t count, __m512 squares) {
  const auto scale = _mm512_set1_ps(block.scale);
  for (int64_t i = 0; i < count; i += kDecoded) {
    squares = store_rounded<kStream>(values + i, decode64<Number>(block.bytes + i, scale), squares);
  }
  return squares;
}

// `count` elements, a multiple of kDecoded. Returns the bits of the largest magnitude.
template <typename Number>
FASTDDP_BYTES_AVX512 inline int32_t add_avx512(const std::vector<CodedBlock>& shards, float* sums, int64_t count) {
  auto most = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += kDecoded) {
    __m512 sum[4] = {};  // stays in registers
    for (const auto& [bytes, scale] : shards) {
      __builtin_prefetch(bytes + i + kAhead);
      const auto decoded = decode64<Number>(bytes + i, _mm512_set1_ps(scale));
#pragma GCC unroll 4
      for (int64_t j = 0; j < 4; ++j) sum[j] = _mm512_add_ps(sum[j], decoded.of[j]);
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      _mm512_storeu_ps(sums + i + 16 * j, sum[j]);
      const auto magnitude = _mm512_and_si512(_mm512_castps_si512(sum[j]), _mm512_set1_epi32(0x7fffffff));
      most = _mm512_max_epi32(most, magnitude);
    }
  }
  return _mm512_reduce_max_epi32(most);
}

}  // namespace fastddp

#endif
