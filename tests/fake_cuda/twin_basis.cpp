// gram, orthonormalise and reorthonormalise: kernels/orthogonalise_kernels.py, by torch's operators on the CPU.
#include <ATen/ATen.h>

#include <regex>

#include "low_rank/orthogonalise_cpu.h"
#include "twin.h"

namespace fake_cuda {
namespace {

constexpr double kDependent = 2e-7;

struct BasisRow {
  float* vectors;
  int64_t length;
  int64_t rank;
  int64_t stride;
  int64_t vector_stride;
  int64_t number;
  int64_t first;
  int64_t blocks;
};
struct BlockRow {
  int64_t basis;
  int64_t row;
  int64_t rows;
};

// The rows of one basis that one program works on.
struct Rows {
  const Launch& launch;
  const BlockRow& block;
  const BasisRow& basis;
  int64_t padded;  // Gram matrices are padded x padded
  at::Tensor vectors;

  Rows(const Launch& given, int64_t number, int64_t padded_rank)
      : launch(given), block(given.row<BlockRow>(1, number)), basis(given.row<BasisRow>(0, block.basis)), padded(padded_rank) {
    const auto elements = (block.rows - 1) * basis.stride + (basis.rank - 1) * basis.vector_stride + 1;
    vectors = launch.elements(basis.vectors + block.row * basis.stride, elements, at::kFloat)
                  .as_strided({block.rows, basis.rank}, {basis.stride, basis.vector_stride});
  }

  at::Tensor grams(size_t argument, int64_t first, int64_t count) const {
    auto* address = launch.pointer<double>(argument) + first * padded * padded;
    return launch.elements(address, count * padded * padded, at::kDouble).view({count, padded, padded});
  }

  void store_gram(size_t argument, int64_t number) const {
    const auto wide = vectors.to(at::kDouble);
    const auto gram = grams(argument, number, 1)[0].zero_();
    gram.narrow(0, 0, basis.rank).narrow(1, 0, basis.rank).copy_(at::mm(wide.t(), wide));
  }
};

// L^-T of gram = L L^T, with zeros in the columns of dependent vectors.
at::Tensor inverse_factor(const at::Tensor& gram, double epsilon, bool refills, std::vector<bool>& dependent) {
  const auto rank = gram.size(0);
  const auto rest_of_gram = gram.clone(), result = at::eye(rank, gram.options());
  const auto whole = gram.accessor<double, 2>();
  auto rest = rest_of_gram.accessor<double, 2>(), factor = result.accessor<double, 2>();
  for (int64_t pivot = 0; pivot < rank; ++pivot) {
    const auto left = rest[pivot][pivot];
    const auto limit = std::max(std::sqrt(whole[pivot][pivot]) * kDependent, epsilon);
    dependent.push_back(std::isfinite(left) ? left <= limit * limit : refills);
    for (int64_t i = 0; i < rank; ++i) {
      for (int64_t j = pivot + 1; j < rank && !dependent[pivot]; ++j) {
        const auto share = rest[pivot][j] / left;
        if (i != pivot) rest[i][j] -= rest[i][pivot] * share;
        factor[i][j] -= factor[i][pivot] * share;
      }
      factor[i][pivot] = dependent[pivot] ? 0 : factor[i][pivot] / std::sqrt(left);
    }
  }
  return result;
}

void orthonormalise(const Launch& launch, int64_t number, int64_t padded, bool last) {
  const Rows program(launch, number, padded);
  const auto& basis = program.basis;
  const auto grams = program.grams(2, basis.first, basis.blocks).sum(0);
  const auto gram = grams.narrow(0, 0, basis.rank).narrow(1, 0, basis.rank);
  const bool refills = launch.integer(5) != 0;
  const auto seed = static_cast<uint64_t>(launch.integer(6)) * 1000003 + static_cast<uint64_t>(basis.number);
  std::vector<bool> dependent;
  const auto factor = inverse_factor(gram, launch.real(4), refills, dependent);
  const auto before = program.vectors.to(at::kDouble);
  for (int64_t j = 0; j < basis.rank; ++j) {
    if (dependent[j]) before.select(1, j).zero_();
  }
  const auto result = at::mm(before, factor);
  auto values = result.accessor<double, 2>();
  for (int64_t j = 0; j < basis.rank; ++j) {
    for (int64_t i = 0; i < program.block.rows && dependent[j]; ++i) {
      values[i][j] = refills && !last ? fastddp::pseudo_random(seed, j, program.block.row + i) : 0;
    }
  }
  program.vectors.copy_(result);
  if (!last) program.store_gram(3, number);
}

}  // namespace

std::optional<Twin> basis_twin(const std::string& kernel) {
  static const std::regex pattern("fastddp_(gram|orthonormalise|reorthonormalise)_r([0-9]+)");
  std::smatch match;
  if (!std::regex_match(kernel, match, pattern)) return std::nullopt;
  const auto padded = std::stoll(match[2]);
  const bool is_gram = match[1] == "gram", last = match[1] == "reorthonormalise";
  const auto run = [=](const Launch& launch, int64_t number) {
    is_gram ? Rows(launch, number, padded).store_gram(2, number) : orthonormalise(launch, number, padded, last);
  };
  return Twin{is_gram ? size_t{3} : size_t{7}, run};
}

}  // namespace fake_cuda
