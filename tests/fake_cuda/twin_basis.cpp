// gram, orthonormalise and reorthonormalise: kernels/orthogonalise_kernels.py, vector by vector.
#include <ATen/ATen.h>

#include <cmath>
#include <regex>

#include "codec/orthogonalise_cpu.h"
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

using Square = std::vector<double>;  // padded x padded

struct Program {
  const Launch& launch;
  const BlockRow& block;
  const BasisRow& basis;
  int64_t padded;

  Program(const Launch& given, int64_t number, int64_t padded_rank)
      : launch(given),
        block(given.pointer<const BlockRow>(1)[number]),
        basis(*given.checked(given.pointer<const BasisRow>(0) + block.basis, 1)),
        padded(padded_rank) {}

  float& at(int64_t row, int64_t vector) const {
    return *launch.checked(basis.vectors + (block.row + row) * basis.stride + vector * basis.vector_stride, 1);
  }

  void store_gram(double* grams, int64_t number) const {
    auto* gram = launch.checked(grams + number * padded * padded, padded * padded);
    std::fill(gram, gram + padded * padded, 0.0);
    for (int64_t row = 0; row < block.rows; ++row) {
      for (int64_t i = 0; i < basis.rank; ++i) {
        for (int64_t j = 0; j < basis.rank; ++j) gram[i * padded + j] += double(at(row, i)) * double(at(row, j));
      }
    }
  }

  Square sum_of_grams(const double* grams) const {
    Square sum(padded * padded);
    const auto* first = launch.checked(grams + basis.first * padded * padded, basis.blocks * padded * padded);
    for (int64_t i = 0; i < basis.blocks * padded * padded; ++i) sum[i % (padded * padded)] += first[i];
    return sum;
  }
};

// L^-T of gram = L L^T, and which columns are of dependent vectors.
Square inverse_factor(const Square& gram, int64_t padded, double epsilon, bool refills, std::vector<bool>& dependent) {
  Square rest = gram, factor(padded * padded);
  for (int64_t i = 0; i < padded; ++i) factor[i * padded + i] = 1;
  for (int64_t pivot = 0; pivot < padded; ++pivot) {
    const auto left = rest[pivot * padded + pivot];
    const auto limit = std::max(std::sqrt(gram[pivot * padded + pivot]) * kDependent, epsilon);
    dependent[pivot] = std::isfinite(left) ? left <= limit * limit : refills;
    for (int64_t i = 0; i < padded; ++i) {
      auto& own = factor[i * padded + pivot];
      for (int64_t j = pivot + 1; j < padded && !dependent[pivot]; ++j) {
        const auto share = rest[pivot * padded + j] / left;
        if (i != pivot) rest[i * padded + j] -= rest[i * padded + pivot] * share;
        factor[i * padded + j] -= own * share;
      }
      own = dependent[pivot] ? 0 : own / std::sqrt(left);
    }
  }
  return factor;
}

void orthonormalise(const Launch& launch, int64_t number, int64_t padded, bool last) {
  const Program program(launch, number, padded);
  std::vector<bool> dependent(padded);
  const bool refills = launch.integer(5) != 0;
  const auto factor =
      inverse_factor(program.sum_of_grams(launch.pointer<const double>(2)), padded, launch.real(4), refills, dependent);
  const auto seed = static_cast<uint64_t>(launch.integer(6)) * 1000003 + static_cast<uint64_t>(program.basis.number);
  const auto rank = program.basis.rank;
  for (int64_t row = 0; row < program.block.rows; ++row) {
    std::vector<double> values(rank);
    for (int64_t j = 0; j < rank; ++j) {
      if (dependent[j]) {
        if (refills && !last) values[j] = fastddp::pseudo_random(seed, j, program.block.row + row);
        continue;
      }
      for (int64_t i = 0; i < rank; ++i) {
        if (!dependent[i]) values[j] += double(program.at(row, i)) * factor[i * padded + j];
      }
    }
    for (int64_t j = 0; j < rank; ++j) program.at(row, j) = static_cast<float>(values[j]);
  }
  if (!last) program.store_gram(launch.pointer<double>(3), number);
}

std::vector<Named> memory_of_bases(const Launch& launch) {
  return {{"the table of bases", launch.pointer<void>(0), sizeof(BasisRow)},
          {"the table of programs", launch.pointer<void>(1), launch.programs * sizeof(BlockRow)},
          {"the Gram matrices", launch.pointer<void>(2), launch.programs * sizeof(double)}};
}

}  // namespace

std::optional<Twin> basis_twin(const std::string& kernel) {
  static const std::regex pattern("fastddp_(gram|orthonormalise|reorthonormalise)_r([0-9]+)");
  std::smatch match;
  if (!std::regex_match(kernel, match, pattern)) return std::nullopt;
  const auto padded = std::stoll(match[2]);
  if (match[1] == "gram") {
    return Twin{3, memory_of_bases, [padded](const Launch& launch, int64_t number) {
                  Program(launch, number, padded).store_gram(launch.pointer<double>(2), number);
                }};
  }
  const bool last = match[1] == "reorthonormalise";
  return Twin{7, memory_of_bases,
              [padded, last](const Launch& launch, int64_t number) { orthonormalise(launch, number, padded, last); }};
}

}  // namespace fake_cuda
