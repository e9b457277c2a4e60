// Block8's loops over one block, for the baseline CPU and for newer ones: one source, the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "block8/numbers.h"
#include "block8/x86.h"
#include "pack/measured.h"

namespace fastddp {

// Decodes a few thousand numbers, stores them and measures them.
template <typename Value>
using DecodeLoop = Measured (*)(const CodedBlocks& blocks, Value* values, int64_t count, bool past_caches);

// The loops of one format.
struct BlockLoops {
  int32_t (*add_error)(const float* gradient, const float* error, float scale, float* y, int64_t count);
  // `error` is never null: compilers do not vectorise a loop with that choice in it.
  float (*encode)(const float* y, int32_t most, float* error, uint8_t* bytes, int64_t count, bool adds,
                  const Rounding& rounding, uint32_t first);
  std::tuple<DecodeLoop<float>, DecodeLoop<c10::Half>, DecodeLoop<c10::BFloat16>> decode;
  // sums = the sum of the shards. Returns the bits of the largest magnitude.
  int32_t (*add)(const std::vector<CodedBlock>& shards, float* sums, int64_t count);
};

template <typename Source, typename Destination>
void convert_numbers(const Source* source, Destination* destination, int64_t count) {
  for (auto i = vector_convert(source, destination, count, 1.0f, false); i < count; ++i) {
    destination[i] = static_cast<Destination>(static_cast<float>(source[i]));
  }
}

template <typename Number>
FASTDDP_INLINE float encode_any(const float* y, int32_t most, float* error, uint8_t* bytes, int64_t count, bool adds,
                                const Rounding& rounding, uint32_t first) {
  const auto key = rounding ? rounding->key : 0;
  if (adds) {
    return rounding ? encode_block<Number, true, true>(y, most, error, bytes, count, key, first)
                    : encode_block<Number, false, true>(y, most, error, bytes, count, key, first);
  }
  return rounding ? encode_block<Number, true, false>(y, most, error, bytes, count, key, first)
                  : encode_block<Number, false, false>(y, most, error, bytes, count, key, first);
}

template <typename Number>
FASTDDP_INLINE int32_t add_shards(const std::vector<CodedBlock>& shards, float* sums, int64_t count) {
  std::fill_n(sums, count, 0.0f);
  for (const auto& [bytes, scale] : shards) {
    fetch_soon(bytes, count);
    add_block<Number>(bytes, scale, sums, count);
  }
  return largest_magnitude(sums, count);
}

// The same functions for several processors. In those for newer ones the compiler uses wider vectors for the inlined loops.
#define FASTDDP_BLOCK_LOOPS(name, target)                                                                          \
  template <typename Number>                                                                                       \
  struct name {                                                                                                    \
    target static int32_t add_error(const float* gradient, const float* error, float scale, float* y, int64_t n) { \
      return fastddp::add_error(gradient, error, scale, y, n);                                                     \
    }                                                                                                              \
    target static float encode(const float* y, int32_t most, float* error, uint8_t* bytes, int64_t n, bool adds,   \
                               const Rounding& rounding, uint32_t first) {                                         \
      return encode_any<Number>(y, most, error, bytes, n, adds, rounding, first);                                  \
    }                                                                                                              \
    target static void decode_wide(const uint8_t* bytes, float scale, float* values, int64_t n) {                  \
      decode_block<Number>(bytes, scale, values, n);                                                               \
    }                                                                                                              \
    target static int32_t add(const std::vector<CodedBlock>& shards, float* sums, int64_t n) {                     \
      return add_shards<Number>(shards, sums, n);                                                                  \
    }                                                                                                              \
  };

FASTDDP_BLOCK_LOOPS(OfBaseline, )
#if defined(__x86_64__)
FASTDDP_BLOCK_LOOPS(OfAvx2, FASTDDP_AVX2)
FASTDDP_BLOCK_LOOPS(OfAvx512, FASTDDP_AVX512)
#endif

template <typename Loops, typename Value>
Measured decode_in_passes(const CodedBlock& block, Value* values, int64_t count, bool past_caches) {
  alignas(64) Value rounded[kMostInBlock];
  if constexpr (std::is_same_v<Value, float>) {
    Loops::decode_wide(block.bytes, block.scale, rounded, count);
  } else {
    alignas(64) float wide[kMostInBlock];
    Loops::decode_wide(block.bytes, block.scale, wide, count);
    convert_numbers(wide, rounded, count);
  }
  copy_bytes(rounded, values, count * static_cast<int64_t>(sizeof(Value)), past_caches);
  return measure_block(rounded, count);
}

// Stores each block at once: while it goes to memory, the next one is decoded.
template <typename Loops, typename Value>
Measured decode_blocks(const CodedBlocks& blocks, Value* values, int64_t count, bool past_caches) {
  Measured measured;
  for (int64_t i = 0, begin = 0; begin < count; ++i, begin += blocks.elements()) {
    const auto own = std::min(blocks.elements(), count - begin);
    fetch_soon(blocks[i].bytes, own);
    measured += decode_in_passes<Loops>(blocks[i], values + begin, own, past_caches);
  }
  return measured;
}

template <typename Loops>
constexpr BlockLoops loops_in_passes{
    Loops::add_error, Loops::encode,
    std::tuple{&decode_blocks<Loops, float>, &decode_blocks<Loops, c10::Half>, &decode_blocks<Loops, c10::BFloat16>},
    Loops::add};

#if defined(__x86_64__)
template <typename Number, bool kStream, typename Value>
FASTDDP_BYTES_AVX512 Measured decode_blocks_avx512(const CodedBlocks& blocks, Value* values, int64_t count, bool past_caches) {
  Measured measured;
  auto squares = _mm512_setzero_ps();
  for (int64_t i = 0, begin = 0; begin < count; ++i, begin += blocks.elements()) {
    const auto block = blocks[i];
    const auto own = std::min(blocks.elements(), count - begin);
    fetch_soon(block.bytes, own);
    const auto whole = has_usual_numbers(block.scale) ? own / kDecoded * kDecoded : 0;
    squares = decode_avx512<Number, kStream>(block, values + begin, whole, squares);
    if (whole == own) continue;
    const CodedBlock rest{block.bytes + whole, block.scale};
    measured += decode_in_passes<OfAvx512<Number>>(rest, values + begin + whole, own - whole, past_caches);
  }
  measured.sum_of_squares += _mm512_reduce_add_ps(squares);
  return std::isfinite(measured.sum_of_squares) ? measured : measure_block(values, count);
}

template <typename Number, typename Value>
Measured decode_at_once(const CodedBlocks& blocks, Value* values, int64_t count, bool past_caches) {
  const bool streams = past_caches && reinterpret_cast<uintptr_t>(values) % 64 == 0;
  return streams ? decode_blocks_avx512<Number, true>(blocks, values, count, true)
                 : decode_blocks_avx512<Number, false>(blocks, values, count, past_caches);
}

template <typename Number>
constexpr BlockLoops loops_at_once{
    OfAvx512<Number>::add_error, OfAvx512<Number>::encode,
    std::tuple{&decode_at_once<Number, float>, &decode_at_once<Number, c10::Half>, &decode_at_once<Number, c10::BFloat16>},
    add_avx512<Number>};
#endif

// With vectors of at most so many bits; 0: the baseline's vectors.
template <typename Number>
const BlockLoops& loops_for(int64_t most_vector_bits) {
#if defined(__x86_64__)
  if (most_vector_bits >= 512 && has_bytes_avx512()) return loops_at_once<Number>;
  if (most_vector_bits >= 256 && has_avx2()) return loops_in_passes<OfAvx2<Number>>;
#endif
  return loops_in_passes<OfBaseline<Number>>;
}

}  // namespace fastddp
