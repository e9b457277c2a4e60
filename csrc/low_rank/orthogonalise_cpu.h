#pragma once

#include "low_rank/kernels.h"

namespace fastddp {

// LowRankKernels::orthogonalise for one basis: Gram-Schmidt, each vector twice, on a copy in fp64, which is cheap on the CPU.
// It finds the same basis as CholeskyQR2: the one whose triangular factor has a positive diagonal.
void orthogonalise_on_cpu(const Basis& basis, double epsilon, std::optional<uint64_t> refill);

// Uniform in [-1, 1), from a seed and the numbers of a vector and an element. The Triton kernels draw the same.
inline double pseudo_random(uint64_t seed, uint64_t vector, uint64_t element) {
  auto bits = seed + 0x9e3779b97f4a7c15u * (vector * 0x100000001b3u + element + 1);
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  bits ^= bits >> 31;
  return static_cast<double>(bits >> 11) * 0x1p-52 - 1.0;
}

}  // namespace fastddp
