// PowerSGD's kernels on a GPU: launches the Triton kernels of kernels/low_rank_kernels.py and orthogonalise_kernels.py, each
// for all matrices of a bucket. torch's operators do what these kernels cannot.
#include <algorithm>
#include <bit>

#include "device/scratch.h"
#include "low_rank/tables.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

// The tables of one kind of call. Each kind has its own, since they run on different streams.
struct Tables {
  Tables(c10::Device device, const CudaDriver& driver) : rows(device, driver), blocks(device, driver), sums(device, driver) {}

  size_t uploads() const { return rows.uploads() + blocks.uploads() + sums.uploads(); }

  DeviceTable rows;    // of matrices or bases, with their addresses
  DeviceTable blocks;  // a row for each program
  DeviceTable sums;
};

unsigned programs_of(const at::Tensor& table, int64_t words_a_row) {
  return static_cast<unsigned>(table.numel() / words_a_row);
}

class GpuLowRankKernels : public LowRankKernels {
 public:
  GpuLowRankKernels(c10::Device device, const CudaDriver& driver, Purpose purpose)
      : device_(device),
        purpose_(purpose),
        launcher_(device, driver),
        scratch_(device, purpose),
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
    launch_or_else(
        {kernel},
        [&] {
          launcher_.run(*kernel, programs_of(blocks, kBlockWords), rows.const_data_ptr(), blocks.const_data_ptr(), scale);
        },
        [&] { otherwise_->compress(matrices, scale); });
  }

  void project(const std::vector<LowRankMatrix>& matrices, double scale) override {
    const auto* kernel = find("project", matrices);
    const auto* adder = find_kernel(device_, "fastddp_sum_partials", purpose_);
    if (kernel == nullptr || adder == nullptr) return otherwise_->project(matrices, scale);
    const auto columns = kernel->tile.at(0), elements = adder->tile.at(0);
    const auto& rows = project_.rows.refresh(matrix_words(matrices));
    const auto shapes = shape_words(matrices);
    const auto& blocks = project_.blocks.refresh(shapes, [&] { return project_blocks(matrices, columns); });
    const auto& runs = project_.sums.refresh(shapes, [&] { return sums(matrices, columns, elements); });
    const auto partials = scratch_.empty({partial_numbers(matrices, columns)}, at::kFloat);
    launch_or_else(
        {kernel, adder},
        [&] {
          launcher_.run(*kernel, programs_of(blocks, kBlockWords), rows.const_data_ptr(), blocks.const_data_ptr(),
                        partials.const_data_ptr());
          launcher_.run(*adder, programs_of(runs, kSumWords), rows.const_data_ptr(), runs.const_data_ptr(),
                        partials.const_data_ptr(), scale);
        },
        [&] { otherwise_->project(matrices, scale); });
  }

  at::Tensor reconstruct(const std::vector<LowRankMatrix>& matrices) override {
    const auto* kernel = find("reconstruct", matrices);
    if (kernel == nullptr) return otherwise_->reconstruct(matrices);
    for (const auto& matrix : matrices) TORCH_CHECK(matrix.gradient.defined(), kNoGradient);
    const auto& rows = reconstruct_.rows.refresh(matrix_words(matrices));
    const auto& blocks = reconstruct_.blocks.refresh(
        shape_words(matrices), [&] { return reconstruct_blocks(matrices, kernel->tile.at(0), kernel->tile.at(1)); });
    const auto programs = programs_of(blocks, kBlockWords);
    const auto measured = scratch_.empty({programs, 2}, at::kDouble);
    launch_or_else(
        {kernel},
        [&] { launcher_.run(*kernel, programs, rows.const_data_ptr(), blocks.const_data_ptr(), measured.const_data_ptr()); },
        [&] { write_sums(otherwise_->reconstruct(matrices), measured); });
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
    const auto grams = scratch_.empty({programs, padded, padded}, at::kDouble);
    const auto next_grams = scratch_.empty({programs, padded, padded}, at::kDouble);
    const auto *first = grams.const_data_ptr(), *second = next_grams.const_data_ptr();
    const auto *bases_there = rows.const_data_ptr(), *blocks_there = blocks.const_data_ptr();
    const int64_t refills = refill.has_value() ? 1 : 0;
    const auto seed = std::bit_cast<int64_t>(refill.value_or(0));
    launch_or_else(
        {gram, once, twice},
        [&] {
          launcher_.run(*gram, programs, bases_there, blocks_there, first);
          launcher_.run(*once, programs, bases_there, blocks_there, first, second, epsilon, refills, seed);
          launcher_.run(*twice, programs, bases_there, blocks_there, second, first, 0.0, refills, seed);
        },
        [&] { otherwise_->orthogonalise(bases, epsilon, refill); });
  }

  size_t launches() const override { return launcher_.launches(); }

  size_t uploads() const override {
    return compress_.uploads() + project_.uploads() + reconstruct_.uploads() + zeroed_.uploads() + refilled_.uploads();
  }

  bool wrote_around() const override { return scratch_.wrote_around(); }

 private:
  // The loaded kernel for the smallest rank that is at least `rank`; null: there is none.
  const LoadedKernel* find(const std::string& form, int64_t rank) const {
    for (auto padded = std::bit_ceil(static_cast<uint64_t>(rank)); padded <= kMostVectors; padded *= 2) {
      const auto* kernel = find_kernel(device_, "fastddp_" + form + "_r" + std::to_string(padded), purpose_);
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
      for (const auto& tensor : {matrix.gradient, matrix.memory, matrix.before}) {
        if (!tensor.defined()) continue;
        if (dtype == c10::ScalarType::Undefined) dtype = tensor.scalar_type();
        if (tensor.scalar_type() != dtype || tensor.is_neg() || !tensor.is_contiguous()) return nullptr;
      }
    }
    return dtype == c10::ScalarType::Undefined ? nullptr : find(std::string(form) + "_" + triton_name(dtype), rank);
  }

  const c10::Device device_;
  const Purpose purpose_;
  Launcher launcher_;
  Scratch scratch_;
  const std::unique_ptr<LowRankKernels> otherwise_ = make_aten_low_rank_kernels();
  Tables compress_, project_, reconstruct_;
  Tables zeroed_, refilled_;  // for P, whose dependent vectors become zero, and for Q, whose are refilled
};

}  // namespace

std::unique_ptr<LowRankKernels> make_gpu_low_rank_kernels(c10::Device device, Purpose purpose) {
  return std::make_unique<GpuLowRankKernels>(device, *CudaDriver::of(device.type()), purpose);
}

}  // namespace fastddp
