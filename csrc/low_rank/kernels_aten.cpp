// PowerSGD's kernels from torch's operators: on every device, with many launches.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <bit>

#include "low_rank/kernels.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

const at::Tensor& m_of(const LowRankMatrix& matrix) {
  return matrix.memory.defined() ? matrix.memory : matrix.gradient;
}

// pseudo_random() of orthogonalise_cpu.h for all elements of a vector, in int64, whose products wrap around.
at::Tensor pseudo_random_vector(uint64_t seed, int64_t vector, const at::Tensor& like) {
  const auto number = [](uint64_t bits) { return std::bit_cast<int64_t>(bits); };
  const auto right = [&](const at::Tensor& bits, int64_t by) {
    return bits.bitwise_right_shift(by).bitwise_and(number(~uint64_t{0} >> by));
  };
  const auto first = number(static_cast<uint64_t>(vector) * 0x100000001b3u + 1);
  auto bits = at::arange(like.numel(), like.options().dtype(at::kLong)).add(first);
  bits = bits.mul(number(0x9e3779b97f4a7c15u)).add(number(seed));
  bits = bits.bitwise_xor(right(bits, 30)).mul(number(0xbf58476d1ce4e5b9u));
  bits = bits.bitwise_xor(right(bits, 27)).mul(number(0x94d049bb133111ebu));
  return right(bits.bitwise_xor(right(bits, 31)), 11).to(at::kDouble).mul(0x1p-52).sub(1.0);
}

at::Tensor without_earlier(at::Tensor vector, const std::vector<at::Tensor>& earlier) {
  for (int time = 0; time < 2; ++time) {
    for (const auto& other : earlier) vector = vector - other * at::dot(other, vector);
  }
  return vector;
}

class AtenLowRankKernels : public LowRankKernels {
 public:
  void compress(const std::vector<LowRankMatrix>& matrices, double scale) override {
    for (const auto& matrix : matrices) {
      const c10::OptionalDeviceGuard guard(matrix.p.device());
      if (matrix.memory.defined() && !matrix.memory.is_same(matrix.before)) matrix.memory.copy_(matrix.before);
      if (matrix.memory.defined() && matrix.gradient.defined()) matrix.memory.add_(matrix.gradient);
      auto p = matrix.p;
      at::mm_out(p, m_of(matrix).to(p.scalar_type()), matrix.q.t());
      p.mul_(scale);
    }
  }

  void project(const std::vector<LowRankMatrix>& matrices, double scale) override {
    for (const auto& matrix : matrices) {
      const c10::OptionalDeviceGuard guard(matrix.p.device());
      auto q = matrix.q;
      at::mm_out(q, matrix.p.t(), m_of(matrix).to(q.scalar_type()));
      q.mul_(scale);
    }
  }

  at::Tensor reconstruct(const std::vector<LowRankMatrix>& matrices) override {
    std::vector<at::Tensor> measured;
    for (const auto& matrix : matrices) {
      const c10::OptionalDeviceGuard guard(matrix.p.device());
      TORCH_CHECK(matrix.gradient.defined(), kNoGradient);
      matrix.gradient.copy_(at::mm(matrix.p, matrix.q));
      if (matrix.memory.defined()) matrix.memory.sub_(matrix.gradient).nan_to_num_(0, 0, 0);
      measured.push_back(measure_with_operators(matrix.gradient));
    }
    return measured.empty() ? at::zeros({0, 2}, at::kDouble) : at::stack(measured);
  }

  void orthogonalise(const std::vector<Basis>& bases, double epsilon, std::optional<uint64_t> refill) override {
    for (const auto& basis : bases) {
      const c10::OptionalDeviceGuard guard(basis.vectors.device());
      std::vector<at::Tensor> done;
      for (int64_t c = 0; c < basis.vectors.size(1); ++c) {
        const auto given = basis.vectors.select(1, c).to(at::kDouble);
        auto vector = without_earlier(given, done);
        const auto norm = at::linalg_vector_norm(vector);
        const auto limit = at::linalg_vector_norm(given).mul(2e-7).clamp_min(epsilon);
        const auto finite = at::isfinite(norm);
        const auto gone =
            refill.has_value() ? finite.logical_not().logical_or(norm <= limit) : finite.logical_and(norm <= limit);
        const auto instead = refill.has_value()
                                 ? without_earlier(pseudo_random_vector(seed_of(basis, *refill), c, vector), done)
                                 : at::zeros_like(vector);
        vector = at::where(gone, instead, vector);
        const auto length = at::linalg_vector_norm(vector);
        done.push_back(vector / at::where(length == 0, at::ones_like(length), length));
        basis.vectors.select(1, c).copy_(done.back());
      }
    }
  }
};

}  // namespace

std::unique_ptr<LowRankKernels> make_aten_low_rank_kernels() {
  return std::make_unique<AtenLowRankKernels>();
}

}  // namespace fastddp
