// The formats of 8 bits, as plain loops over one block, which compilers vectorise: note [Blocks of 8 bits], kernels.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "block8/kernels.h"
#include "device/vector_x86.h"

namespace fastddp {

// Inlined into functions for the baseline CPU and for newer ones: one source, the same bits.
#define FASTDDP_INLINE __attribute__((always_inline)) inline

// Prefetches memory that is needed soon. The hardware's own prefetch stops at each page, and does not follow many wires at
// once. We fetch a little at a time, because few cache lines can be on their way at once.
constexpr int64_t kAhead = 2048;  // bytes
constexpr int64_t kLine = 64;     // bytes of a cache line
FASTDDP_INLINE void fetch_soon(const uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(bytes + kAhead + i);
}
FASTDDP_INLINE void fetch_soon_for_writing(const float* values, int64_t count) {
  for (int64_t i = 0; i < count; i += kLine / 4) __builtin_prefetch(values + kAhead / 4 + i, 1);
}

// A block of bytes, as it travels.
struct CodedBlock {
  const uint8_t* bytes;
  float scale;
};

// Where the blocks of a wire lie: note [Blocks of 8 bits].
struct BlockPlaces {
  Block8 format;

  template <typename Byte>
  Byte* bytes(Byte* wire, int64_t block) const {
    return group(wire, block) + Block8::kBlocks * sizeof(float) + block % Block8::kBlocks * format.block;
  }

  template <typename Byte>
  Byte* scale_at(Byte* wire, int64_t block) const {
    return group(wire, block) + block % Block8::kBlocks * sizeof(float);
  }

  float scale(const uint8_t* wire, int64_t block) const {
    float scale;
    std::memcpy(&scale, scale_at(wire, block), sizeof(float));
    return scale;
  }

  CodedBlock coded(const uint8_t* wire, int64_t block) const { return {bytes(wire, block), scale(wire, block)}; }

 private:
  template <typename Byte>
  Byte* group(Byte* wire, int64_t block) const {
    return wire + block / Block8::kBlocks * format.group_bytes();
  }
};

// Blocks that follow one another in a wire.
struct CodedBlocks {
  const BlockPlaces& places;
  const uint8_t* wire;
  int64_t first;

  int64_t elements() const { return places.format.block; }  // of each
  CodedBlock operator[](int64_t i) const { return places.coded(wire, first + i); }
};

constexpr int64_t kMostInBlock = 256;
constexpr float kLeastMagnitude = 0x1p-100f, kMostMagnitude = 0x1p127f;

// h(h(i ^ low) + high), its upper half as a fraction.
FASTDDP_INLINE uint32_t hash(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
FASTDDP_INLINE float draw(uint64_t key, uint32_t element) {
  const auto random = hash(hash(element ^ static_cast<uint32_t>(key)) + static_cast<uint32_t>(key >> 32));
  return static_cast<float>(static_cast<int32_t>(random >> 16)) * 0x1p-16f;
}

// Rounds a number below 2^22 to an integer. To nearest: adds 2^23, which leaves no room for a fraction.
template <bool kStochastic>
FASTDDP_INLINE int32_t round_up_or_down(float magnitude, float fraction) {
  if constexpr (kStochastic) return static_cast<int32_t>(magnitude + fraction);
  return std::bit_cast<int32_t>(magnitude + 0x1p23f) & 0x7fffff;
}

// Signs and choices use integer operations: compilers do not vectorise a choice between two floats, which might trap.
constexpr int32_t kSign = std::numeric_limits<int32_t>::min();
FASTDDP_INLINE int32_t smaller_magnitude(int32_t bits, float largest) {
  return std::min(bits & ~kSign, std::bit_cast<int32_t>(largest));
}
FASTDDP_INLINE float with_sign(float magnitude, int32_t bits) {
  return std::bit_cast<float>(std::bit_cast<int32_t>(magnitude) | (bits & kSign));
}

struct Int8 {
  static constexpr float kLargest = 127.0f;

  // Returns the byte of x; `value` is the byte's value in units of the scale.
  template <bool kStochastic>
  static FASTDDP_INLINE int32_t byte_of(float x, float fraction, float& value) {
    const auto bits = std::bit_cast<int32_t>(x);
    const auto magnitude = std::bit_cast<float>(smaller_magnitude(bits, kLargest));
    const auto k = round_up_or_down<kStochastic>(magnitude, fraction), sign = bits >> 31;
    const auto number = (k ^ sign) - sign;
    value = static_cast<float>(number);
    return number & 0xff;
  }

  static constexpr FASTDDP_INLINE float value_of(uint8_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); }
};

template <int kMantissa, int kBias, int kLargestInteger>
struct Float8 {
  static constexpr float kLargest = kLargestInteger;

  template <bool kStochastic>
  static FASTDDP_INLINE int32_t byte_of(float x, float fraction, float& value) {
    const auto bits = std::bit_cast<int32_t>(x);
    const auto magnitude = smaller_magnitude(bits, kLargest);
    // Bits of powers of two. `power` is at most the magnitude, unless that is subnormal. `distance` is that of two neighbours.
    constexpr auto of_exponent = std::bit_cast<int32_t>(std::numeric_limits<float>::infinity()), least = (128 - kBias) << 23;
    const auto power = std::max(magnitude & of_exponent, least), distance = power - (kMantissa << 23);
    int32_t k;
    if constexpr (kStochastic) {
      const auto inverse = std::bit_cast<float>((254 << 23) - distance);
      k = static_cast<int32_t>(std::bit_cast<float>(magnitude) * inverse + fraction);
      value = static_cast<float>(k) * std::bit_cast<float>(distance);
    } else {
      const auto no_fraction = distance + (23 << 23);
      const auto sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(no_fraction);
      k = std::bit_cast<int32_t>(sum) - no_fraction;
      value = sum - std::bit_cast<float>(no_fraction);
    }
    value = with_sign(value, bits);
    return ((power - least) >> (23 - kMantissa)) + k | ((bits >> 24) & 0x80);
  }

  static constexpr FASTDDP_INLINE float value_of(uint8_t byte) {
    constexpr float least = std::bit_cast<float>((127 - kBias - kMantissa + 1) << 23);  // the smallest one above zero
    const int32_t magnitude = byte & 0x7f;
    const auto normal = (magnitude << (23 - kMantissa)) + ((127 - kBias) << 23);
    const auto subnormal = std::bit_cast<int32_t>(static_cast<float>(magnitude) * least);
    const auto is_subnormal = (magnitude - (1 << kMantissa)) >> 31;  // all bits, or none
    const auto bits = (normal & ~is_subnormal) | (subnormal & is_subnormal);
    return std::bit_cast<float>(bits | (static_cast<int32_t>(byte) << 24 & kSign));
  }
};

using E4m3 = Float8<3, 7, 448>;
using E5m2 = Float8<2, 15, 57344>;

// The loops. `first` is the number of the block's first element.

// y = gradient * scale + error (may be null). Returns the bits of the largest magnitude; a NaN's bits are above all others.
FASTDDP_INLINE int32_t add_error(const float* __restrict gradient, const float* __restrict error, float scale,
                                 float* __restrict y, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto scaled = gradient[i] * scale;
    y[i] = error == nullptr ? scaled : scaled + error[i];
    most = std::max(most, std::bit_cast<int32_t>(y[i]) & 0x7fffffff);
  }
  return most;
}

// error = y - value, or with kAdd, error += y - value.
template <typename Number, bool kStochastic, bool kAdd>
FASTDDP_INLINE float encode_block(const float* __restrict y, int32_t most, float* __restrict error, uint8_t* __restrict bytes,
                                  int64_t count, uint64_t key, uint32_t first) {
  const auto magnitude = std::bit_cast<float>(most);
  const bool is_finite = magnitude <= kMostMagnitude;
  if (!is_finite || magnitude < kLeastMagnitude) {
    for (int64_t i = 0; i < count; ++i) {
      bytes[i] = 0;
      const auto left = is_finite ? y[i] : 0.0f;
      error[i] = kAdd ? error[i] + left : left;
    }
    return is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const auto scale = magnitude / Number::kLargest, inverse = Number::kLargest / magnitude;
  for (int64_t i = 0; i < count; ++i) {
    float value;
    const auto fraction = kStochastic ? draw(key, first + static_cast<uint32_t>(i)) : 0.0f;
    bytes[i] = static_cast<uint8_t>(Number::template byte_of<kStochastic>(y[i] * inverse, fraction, value));
    const auto left = y[i] - value * scale;
    error[i] = kAdd ? error[i] + left : left;
  }
  return scale;
}

template <typename Number>
FASTDDP_INLINE void decode_block(const uint8_t* __restrict bytes, float scale, float* __restrict values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = Number::value_of(bytes[i]) * scale;
}

// sums += values.
template <typename Number>
FASTDDP_INLINE void add_block(const uint8_t* __restrict bytes, float scale, float* __restrict sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += Number::value_of(bytes[i]) * scale;
}

// The bits of the largest magnitude; a NaN's bits are above all others.
FASTDDP_INLINE int32_t largest_magnitude(const float* values, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::bit_cast<int32_t>(values[i]) & 0x7fffffff);
  return most;
}

}  // namespace fastddp
