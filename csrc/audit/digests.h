// Digests of the bits of tensors. Ranks compare them to see whether their tensors are equal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace fastddp {

// Elements [begin, end) of a tensor, in logical order. An undefined tensor: no slice.
struct Slice {
  at::Tensor tensor;
  int64_t begin = 0;
  int64_t end = 0;
};

// Note [Digests]
// A digest is a sum of 32-bit words, each times an odd 64-bit number that depends on its place, modulo 2^64. It sees every bit:
// if one word changes, the difference is below 2^32 and not 0, so the difference times an odd number is no multiple of 2^64.
// Several changes cancel with a probability of about 2^-32. Words of 64 bits would be read twice as fast. But of their top bit,
// which is a sign, a sum modulo 2^64 keeps only whether it is set an even number of times.
//
// Word i is multiplied by block(i / 2^20) * row(i / 4096 % 256) * column(i % 4096), so numbers for 2^20 words are enough. The
// digest is the same on the CPU, where a loop reads memory once, and on other devices, where torch's operators compute it.
class Digests {
 public:
  // The digests of `slices`: [slices], int64, on `device`. Runs on the current streams; the host waits for no device.
  at::Tensor of(const std::vector<Slice>& slices, c10::Device device);

 private:
  class Batch;
  const at::Tensor& factors(c10::Device device);

  std::unordered_map<c10::Device, at::Tensor> factors_;  // of the first 2^20 words
};

}  // namespace fastddp
