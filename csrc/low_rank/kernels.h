// The kernels of PowerSGD (Vogels et al., 2019): a gradient M, as a matrix, travels as a product P Q of two thin ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "device/launcher.h"

namespace fastddp {

// One gradient. P and Q are fp32, or fp64 if the gradient is fp64. All arithmetic happens in their dtype.
struct LowRankMatrix {
  // [rows, columns], contiguous, fp32, fp16, bf16 or fp64. In the order of the parameter's memory.
  at::Tensor gradient;
  // Like the gradient: compress() writes M = gradient + `before` to it, reconstruct() the new error. Undefined without error
  // feedback: then M is the gradient.
  at::Tensor memory;
  at::Tensor p;       // [rows, rank], contiguous
  at::Tensor q;       // [rank, columns], contiguous: row i is the i-th vector
  at::Tensor before;  // like the memory, which it may be: the error of earlier windows. compress() alone reads it
};

constexpr int kMostVectors = 32;

// Vectors to make orthonormal: [length, rank], of any strides, fp32 or fp64, 1 <= rank <= kMostVectors.
struct Basis {
  at::Tensor vectors;  // vector i is column i
  uint64_t number;     // gives each basis its own random numbers
};

// Note [The same product on all ranks]
// Each rank sends P and Q of its own gradients, and computes by itself what follows from their sums: bases and the product, which
// is the gradient. Replicas drift apart if it differs in one bit. So on the CPU all implementations round after each multiplication
// and each addition there, in one order of additions, whatever the processor has. compress() and project() may fuse both.

// One call does all matrices of a bucket. Elements are read and written once: M costs 28 bytes an element in all.
class LowRankKernels : public CallsKernels {
 public:
  // memory = M = before + gradient, p = scale * M q^T.
  virtual void compress(const std::vector<LowRankMatrix>& matrices, double scale) = 0;

  // q = scale * p^T M.
  virtual void project(const std::vector<LowRankMatrix>& matrices, double scale) = 0;

  // gradient = p q, memory = M - gradient, or 0 where that is not finite: a step that overflowed leaves no trace. Returns
  // the same as Kernels::measure() would for the gradients.
  virtual at::Tensor reconstruct(const std::vector<LowRankMatrix>& matrices) = 0;

  // Orthonormalises each basis in place, in fp64, and keeps its span. A vector is dependent if at most
  // max(epsilon, 2e-7 of its norm) of it is orthogonal to the vectors before it. A dependent vector becomes zero, so its
  // share of a product vanishes. With `refill`, a seed, a vector that is dependent or not finite is replaced by a
  // pseudo-random one, the same on all ranks, so that it can grow again.
  virtual void orthogonalise(const std::vector<Basis>& bases, double epsilon, std::optional<uint64_t> refill) = 0;
};

constexpr const char* kNoGradient = "fastddp: no gradient to reconstruct into";

// The kernels that fit the device, as make_kernels().
std::unique_ptr<LowRankKernels> make_low_rank_kernels(c10::Device device, Purpose purpose = Purpose::training);

// One pass each, over at::parallel_for, with vectors of at most so many bits.
std::unique_ptr<LowRankKernels> make_cpu_low_rank_kernels(int64_t most_vector_bits = 512);
std::unique_ptr<LowRankKernels> make_aten_low_rank_kernels();  // torch's operators, on every device

// The seed of the random vectors of one basis.
inline uint64_t seed_of(const Basis& basis, uint64_t seed) {
  return seed * 1000003 + basis.number;
}

}  // namespace fastddp
