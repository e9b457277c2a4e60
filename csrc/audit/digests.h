// Digests of the bits of tensors, by which ranks see whether theirs are equal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace fastddp {

// Elements [begin, end) of a tensor, in logical order; undefined: there is none.
struct Slice {
  at::Tensor tensor;
  int64_t begin = 0;
  int64_t end = 0;
};

// Note [Digests]
// A digest is the sum of 32-bit words, each times an odd number of 64 bits that depends on its place, modulo 2^64. So it sees
// every bit: what is added by a change of one word is below 2^32 and not 0, and times an odd number it is no multiple of 2^64.
// Several changes cancel with a probability of about 2^-32. Words of 64 bits would be read twice as fast, but of their top bit,
// which is a sign, a sum modulo 2^64 keeps only whether it is set an even number of times.
//
// Word i is multiplied by block(i / 2^20) * row(i / 4096 % 256) * column(i % 4096), so that numbers for 2^20 words are enough.
// It is the same number on the CPU, where a loop reads memory once, and on other devices, where torch's operators do it.
class Digests {
 public:
  // Those of `slices`, [slices], int64, on `device`. Runs on the current streams; the host waits for no device.
  at::Tensor of(const std::vector<Slice>& slices, c10::Device device);

 private:
  class Batch;
  const at::Tensor& factors(c10::Device device);

  std::unordered_map<c10::Device, at::Tensor> factors_;  // of the first 2^20 words
};

}  // namespace fastddp
