#pragma once

#include "codec/low_rank_kernels.h"

namespace fastddp {

// LowRankKernels::orthogonalise for one basis. On the CPU a copy of the vectors in fp64 is cheap, and Gram-Schmidt on it,
// each vector twice, finds the same basis as CholeskyQR2: the one whose triangular factor has a positive diagonal.
void orthogonalise_on_cpu(const Basis& basis, double epsilon, std::optional<uint64_t> refill);

// Uniform in [-1, 1), from a seed, a vector's and an element's number: the same on every device.
inline double pseudo_random(uint64_t seed, uint64_t vector, uint64_t element) {
  auto bits = seed + 0x9e3779b97f4a7c15u * (vector * 0x100000001b3u + element + 1);
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  bits ^= bits >> 31;
  return static_cast<double>(bits >> 11) * 0x1p-52 - 1.0;
}

}  // namespace fastddp
