// The kernels of block8: gradients as numbers of 8 bits, with a scale for each block of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "device/launcher.h"

namespace fastddp {

// Note [Blocks of 8 bits]
// A wire of bytes is a row of *groups*. A group has the scales of four blocks in fp32, then the numbers of these four blocks.
// So every part of a group begins at a multiple of 16 bytes, and a wire can be cut between any two groups. Each gradient
// begins a new block. The rest of its last block is zero, and so are blocks that belong to no gradient.
//
// Let y be the numbers of a block, m their largest magnitude and L the format's largest number. In fp32, each step rounded once:
//   scale = m / L,  x = y * (L / m),  number = x rounded to the format,  value = number * scale.
// A block with m < 2^-100 counts as zero: its scale and its bytes are 0. A block with m > 2^127, or with a number that is not
// finite, has scale NaN and bytes 0: all its values are NaN, on all ranks. (Above 2^127 the scale may have been rounded up, and
// the largest number would become infinite.)
//
// Rounding: let D be the distance between two neighbours of the format at |x|. For int8, D = 1. For floats,
// D = 2^(max(e, least) - mantissa bits), where e is the exponent of |x|, and least that of the smallest normal number. Then
// number = k * D with x's sign bit (so a float -0 stays -0). To nearest, ties to even: k = rint(|x| / D). Stochastically:
// k = floor(min(|x|, L) / D + u), u in [0, 1) of 16 bits.
struct Block8 {
  enum class Number : uint8_t { int8, e4m3, e5m2 };  // e4m3: torch.float8_e4m3fn, e5m2: torch.float8_e5m2
  static constexpr std::array<const char*, 3> kNames{"int8", "e4m3", "e5m2"};

  Number number;
  int64_t block;  // elements: 128 or 256

  static constexpr int64_t kBlocks = 4;  // of a group
  // What begins at multiples of these can travel in blocks of either length.
  static constexpr int64_t kLongestBlock = 256, kLongestGroup = kBlocks * kLongestBlock;
  int64_t group_bytes() const { return kBlocks * (block + static_cast<int64_t>(sizeof(float))); }
  int64_t group_elements() const { return kBlocks * block; }
  int64_t blocks_of(int64_t elements) const { return (elements + block - 1) / block; }
};

// The random u of element i of a wire, counted from its first block (modulo 2^32): u = (h(h(i ^ low) + high) >> 16) / 2^16,
// with h(x) = { x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16 }. low and high are the halves of
// `key`. Each key gives other numbers.
struct Dice {
  uint64_t key;
};
using Rounding = std::optional<Dice>;  // none: to nearest

// A gradient in the order of its parameter's memory, and its blocks.
struct BlockedGradient {
  at::Tensor gradient;  // [elements], contiguous, fp32, fp16 or bf16
  int64_t first_block;  // in the wire
};

// All wires are uint8, [groups * group_bytes], contiguous, and begin at a multiple of 16 bytes. Errors are fp32, one for each
// number of the wire: [groups * group_elements]; undefined: none. A call does all gradients of a bucket, or those that arrived.
class Block8Kernels : public CallsKernels {
 public:
  // y = gradient * scale + before; wire = y as above; error = y - value, 0 in a block that is not finite. Writes only the blocks
  // of `gradients`; the maker of the wire zeroes the others once. `before`: the errors so far; it may be `error`.
  virtual void encode(const std::vector<BlockedGradient>& gradients, const at::Tensor& before, const at::Tensor& error,
                      const at::Tensor& wire, double scale, Rounding rounding) = 0;

  // y = 0 plus the values of `shards` (parts of wires) in their order, in fp32; target = y as above; error += y - value, except
  // in a block that is not finite. `target` may be one of the shards. For `rounding`, elements count from `first_element`.
  virtual void add(const std::vector<at::Tensor>& shards, const at::Tensor& target, const at::Tensor& error, Rounding rounding,
                   int64_t first_element) = 0;

  // gradient = value, rounded to its dtype. Returns the same as Kernels::measure() would for the gradients.
  virtual at::Tensor decode(const std::vector<BlockedGradient>& gradients, const at::Tensor& wire) = 0;
};

// The kernels that fit the device, as make_kernels().
std::unique_ptr<Block8Kernels> make_block8_kernels(Block8 format, c10::Device device, Purpose purpose = Purpose::training);

// One pass each, over at::parallel_for, with the processor's widest vectors of at most so many bits.
std::unique_ptr<Block8Kernels> make_cpu_block8_kernels(Block8 format, int64_t most_vector_bits = 512);
std::unique_ptr<Block8Kernels> make_aten_block8_kernels(Block8 format);  // torch's operators, on every device

}  // namespace fastddp
