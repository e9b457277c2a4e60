// PowerSGD's kernels on a GPU: launches the Triton kernels of kernels/low_rank_kernels.py and orthogonalise_kernels.py, each
// for all matrices of a bucket. torch's operators do what these kernels cannot.
#include <ATen/TensorOperators.h>
#include <ATen/ops/diag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <bit>

#include "codec/low_rank_tables.h"
#include "device/proof.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

// The tables of one kind of call. Each kind has its own, since they run on different streams.
struct Tables {
  Tables(c10::Device device, const CudaDriver& driver)
      : rows(device, driver), blocks(device, driver), sums(device, driver) {}

  size_t uploads() const { return rows.uploads() + blocks.uploads() + sums.uploads(); }

  DeviceTable rows;    // of matrices or bases, with their addresses
  DeviceTable blocks;  // a row for each program
  DeviceTable sums;
};

unsigned programs_of(const at::Tensor& table, int64_t words_a_row) {
  return static_cast<unsigned>(table.numel() / words_a_row);
}

std::vector<at::Tensor> tensors_of(const std::vector<LowRankMatrix>& matrices, at::Tensor LowRankMatrix::* of) {
  std::vector<at::Tensor> tensors;
  for (const auto& matrix : matrices) {
    if ((matrix.*of).defined()) tensors.push_back(matrix.*of);
  }
  return tensors;
}

std::vector<at::Tensor> vectors_of(const std::vector<Basis>& bases) {
  std::vector<at::Tensor> vectors;
  for (const auto& basis : bases) vectors.push_back(basis.vectors);
  return vectors;
}

// How far vectors of norm 1 may be from orthogonal, and from the span of the vectors before. We do not compare them with those
// of torch's operators: if vectors are nearly dependent, two algorithms find different bases of one span.
constexpr double kFromOrthonormal = 1e-4;

// Compares the vectors' Gram matrix with the identity, which has zeros for vectors that are zero.
at::Tensor not_orthonormal(const Compared& compared) {
  const auto q = compared.kernel.to(at::kDouble);
  const auto is_there = q.ne(0).any(0).to(at::kDouble);
  return (at::mm(q.t(), q) - at::diag(is_there)).abs().le(kFromOrthonormal).logical_not();
}

at::Tensor not_of_the_same_span(const Compared& compared) {
  const auto q = compared.kernel.to(at::kDouble), before = compared.before.to(at::kDouble);
  const auto left = before - at::mm(q, at::mm(q.t(), before));
  const auto lost = at::linalg_vector_norm(left, 2, at::IntArrayRef{0}) >
                    at::linalg_vector_norm(before, 2, at::IntArrayRef{0}) * kFromOrthonormal;
  return not_orthonormal(compared).logical_or(lost);
}

constexpr Judge kSameSpan{not_of_the_same_span, false};
// Dependent vectors were replaced, so the span may differ.
constexpr Judge kOrthonormal{not_orthonormal, false};

class GpuLowRankKernels : public LowRankKernels {
 public:
  GpuLowRankKernels(c10::Device device, const CudaDriver& driver)
      : device_(device),
        launcher_(device, driver),
        compress_(device, driver),
        project_(device, driver),
        reconstruct_(device, driver),
        zeroed_(device, driver),
        refilled_(device, driver) {}

  void compress(const std::vector<LowRankMatrix>& matrices, double scale) override {
    const auto* kernel = find("compress", matrices);
    if (kernel == nullptr) return otherwise_->compress(matrices, scale);
    const auto& rows = compress_.rows.refresh(matrix_words(matrices));
    const auto& blocks =
        compress_.blocks.refresh(shape_words(matrices), [&] { return compress_blocks(matrices, kernel->tile.at(0)); });
    run_trusted(
        {kernel},
        [&] {
          return Written{tensors_of(matrices, &LowRankMatrix::memory), tensors_of(matrices, &LowRankMatrix::p), {}};
        },
        [&] {
          launcher_.run(*kernel, programs_of(blocks, kBlockWords), rows.const_data_ptr(), blocks.const_data_ptr(),
                        scale);
        },
        [&] { otherwise_->compress(matrices, scale); }, kToRounding);
  }

  void project(const std::vector<LowRankMatrix>& matrices, double scale) override {
    const auto* kernel = find("project", matrices);
    const auto* adder = find_kernel(device_, "fastddp_sum_partials");
    if (kernel == nullptr || adder == nullptr) return otherwise_->project(matrices, scale);
    const auto columns = kernel->tile.at(0), elements = adder->tile.at(0);
    const auto& rows = project_.rows.refresh(matrix_words(matrices));
    const auto shapes = shape_words(matrices);
    const auto& blocks = project_.blocks.refresh(shapes, [&] { return project_blocks(matrices, columns); });
    const auto& runs = project_.sums.refresh(shapes, [&] { return sums(matrices, columns, elements); });
    const auto partials = empty(partial_numbers(matrices, columns), at::kFloat);
    run_trusted(
        {kernel, adder}, [&] { return Written{{}, tensors_of(matrices, &LowRankMatrix::q), {}}; },
        [&] {
          launcher_.run(*kernel, programs_of(blocks, kBlockWords), rows.const_data_ptr(), blocks.const_data_ptr(),
                        partials.const_data_ptr());
          launcher_.run(*adder, programs_of(runs, kSumWords), rows.const_data_ptr(), runs.const_data_ptr(),
                        partials.const_data_ptr(), scale);
        },
        [&] { otherwise_->project(matrices, scale); }, kToRounding);
  }

  at::Tensor reconstruct(const std::vector<LowRankMatrix>& matrices) override {
    const auto* kernel = find("reconstruct", matrices);
    if (kernel == nullptr) return otherwise_->reconstruct(matrices);
    for (const auto& matrix : matrices) TORCH_CHECK(matrix.gradient.defined(), kNoGradient);
    const auto& rows = reconstruct_.rows.refresh(matrix_words(matrices));
    const auto& blocks = reconstruct_.blocks.refresh(
        shape_words(matrices), [&] { return reconstruct_blocks(matrices, kernel->tile.at(0), kernel->tile.at(1)); });
    const auto programs = programs_of(blocks, kBlockWords);
    const auto measured = empty(2 * static_cast<int64_t>(programs), at::kDouble).view({-1, 2});
    run_trusted(
        {kernel},
        [&] {
          return Written{tensors_of(matrices, &LowRankMatrix::memory), tensors_of(matrices, &LowRankMatrix::gradient),
                         measured};
        },
        [&] {
          launcher_.run(*kernel, programs, rows.const_data_ptr(), blocks.const_data_ptr(), measured.const_data_ptr());
        },
        [&] { write_sums(otherwise_->reconstruct(matrices), measured); }, kToRounding);
    return measured;
  }

  void orthogonalise(const std::vector<Basis>& bases, double epsilon, std::optional<uint64_t> refill) override {
    const auto is_double = [](const Basis& basis) { return basis.vectors.scalar_type() != at::kFloat; };
    int64_t rank = 1;
    for (const auto& basis : bases) rank = std::max(rank, basis.vectors.size(1));
    const auto* gram = std::ranges::any_of(bases, is_double) ? nullptr : find("gram", rank);
    const auto* once = find("orthonormalise", rank);
    const auto* twice = find("reorthonormalise", rank);
    if (gram == nullptr || once == nullptr || twice == nullptr) {
      return otherwise_->orthogonalise(bases, epsilon, refill);
    }
    auto& tables = refill.has_value() ? refilled_ : zeroed_;
    const auto lines = gram->tile.at(0), padded = gram->tile.at(1);
    const auto& rows = tables.rows.refresh(basis_words(bases, lines));
    Words lengths;
    for (const auto& basis : bases) lengths.push_back(basis.vectors.size(0));
    const auto& blocks = tables.blocks.refresh(std::move(lengths), [&] { return basis_blocks(bases, lines); });
    const auto programs = programs_of(blocks, kBasisBlockWords);
    const auto grams = empty(2 * programs * padded * padded, at::kDouble);
    const auto* first = grams.const_data_ptr<double>();
    const auto* second = first + programs * padded * padded;
    const auto *bases_there = rows.const_data_ptr(), *blocks_there = blocks.const_data_ptr();
    const int64_t refills = refill.has_value() ? 1 : 0;
    const auto seed = std::bit_cast<int64_t>(refill.value_or(0));
    run_trusted(
        {gram, once, twice}, [&] { return Written{vectors_of(bases), {}, {}}; },
        [&] {
          launcher_.run(*gram, programs, bases_there, blocks_there, first);
          launcher_.run(*once, programs, bases_there, blocks_there, first, second, epsilon, refills, seed);
          launcher_.run(*twice, programs, bases_there, blocks_there, second, first, 0.0, refills, seed);
        },
        [&] { otherwise_->orthogonalise(bases, epsilon, refill); }, refills == 0 ? kSameSpan : kOrthonormal);
  }

  size_t launches() const override { return launcher_.launches(); }

  size_t uploads() const override {
    return compress_.uploads() + project_.uploads() + reconstruct_.uploads() + zeroed_.uploads() + refilled_.uploads();
  }

 private:
  at::Tensor empty(int64_t count, c10::ScalarType dtype) const {
    return at::empty({count}, at::TensorOptions().dtype(dtype).device(device_));
  }

  // The loaded kernel for the smallest rank that is at least `rank`; null: there is none.
  const LoadedKernel* find(const std::string& form, int64_t rank) const {
    for (auto padded = std::bit_ceil(static_cast<uint64_t>(rank)); padded <= kMostVectors; padded *= 2) {
      const auto* kernel = find_kernel(device_, "fastddp_" + form + "_r" + std::to_string(padded));
      if (kernel != nullptr) return kernel;
    }
    return nullptr;
  }

  const LoadedKernel* find(const char* form, const std::vector<LowRankMatrix>& matrices) const {
    if (matrices.empty()) return nullptr;
    int64_t rank = 1;
    auto dtype = c10::ScalarType::Undefined;
    for (const auto& matrix : matrices) {
      rank = std::max(rank, matrix.p.size(1));
      for (const auto& tensor : {matrix.gradient, matrix.memory}) {
        if (!tensor.defined()) continue;
        if (dtype == c10::ScalarType::Undefined) dtype = tensor.scalar_type();
        if (tensor.scalar_type() != dtype || tensor.is_neg() || !tensor.is_contiguous()) return nullptr;
      }
    }
    return dtype == c10::ScalarType::Undefined ? nullptr : find(std::string(form) + "_" + triton_name(dtype), rank);
  }

  const c10::Device device_;
  Launcher launcher_;
  const std::unique_ptr<LowRankKernels> otherwise_ = make_aten_low_rank_kernels();
  Tables compress_, project_, reconstruct_;
  Tables zeroed_, refilled_;  // for P, whose dependent vectors become zero, and for Q, whose are refilled
};

}  // namespace

std::unique_ptr<LowRankKernels> make_gpu_low_rank_kernels(c10::Device device) {
  return std::make_unique<GpuLowRankKernels>(device, *CudaDriver::of(device.type()));
}

}  // namespace fastddp
