// PowerSGD's kernels on a GPU: launches the Triton kernels of kernels/low_rank_kernels.py and orthogonalise_kernels.py, each
// for all matrices of a bucket. torch's operators do what these kernels cannot.
#include <algorithm>
#include <bit>

#include "low_rank/tables.h"

namespace fastddp {
namespace {

class GpuLowRankKernels : public LowRankKernels {
 public:
  GpuLowRankKernels(c10::Device device, Purpose purpose) : launcher_(device, purpose) {}

  void compress(const std::vector<LowRankMatrix>& matrices, double scale) override {
    const auto* kernel = find("compress", matrices);
    const bool is_done = launched({kernel}, [&] {
      const auto blocks = [&] { return compress_blocks(matrices, kernel->tile.at(0)); };
      const auto tables = compress_.refresh(matrix_words(matrices), shape_words(matrices), blocks, kBlockWords);
      launcher_.run(*kernel, tables.programs, tables.addresses, tables.rows, scale);
    });
    if (!is_done) otherwise_->compress(matrices, scale);
  }

  void project(const std::vector<LowRankMatrix>& matrices, double scale) override {
    const auto* kernel = find("project", matrices);
    const auto* adder = launcher_.find("fastddp_sum_partials");
    const bool is_done = launched({kernel, adder}, [&] {
      const auto columns = kernel->tile.at(0), elements = adder->tile.at(0);
      const auto blocks = [&] { return project_blocks(matrices, columns); };
      const auto tables = project_.refresh(matrix_words(matrices), shape_words(matrices), blocks, kBlockWords);
      const auto& runs = sums_.refresh(shape_words(matrices), [&] { return sums(matrices, columns, elements); });
      const auto partials = launcher_.empty({partial_numbers(matrices, columns)}, at::kFloat);
      launcher_.run(*kernel, tables.programs, tables.addresses, tables.rows, partials);
      launcher_.run(*adder, runs.numel() / kSumWords, tables.addresses, runs, partials, scale);
    });
    if (!is_done) otherwise_->project(matrices, scale);
  }

  at::Tensor reconstruct(const std::vector<LowRankMatrix>& matrices) override {
    const auto* kernel = find("reconstruct", matrices);
    at::Tensor measured;
    const bool is_done = launched({kernel}, [&] {
      for (const auto& matrix : matrices) TORCH_CHECK(matrix.gradient.defined(), kNoGradient);
      const auto blocks = [&] { return reconstruct_blocks(matrices, kernel->tile.at(0), kernel->tile.at(1)); };
      const auto tables = reconstruct_.refresh(matrix_words(matrices), shape_words(matrices), blocks, kBlockWords);
      measured = launcher_.empty({tables.programs, 2}, at::kDouble);
      launcher_.run(*kernel, tables.programs, tables.addresses, tables.rows, measured);
    });
    return is_done ? measured : otherwise_->reconstruct(matrices);
  }

  void orthogonalise(const std::vector<Basis>& bases, double epsilon, std::optional<uint64_t> refill) override {
    const auto is_double = [](const Basis& basis) { return basis.vectors.scalar_type() != at::kFloat; };
    int64_t rank = 1;
    for (const auto& basis : bases) rank = std::max(rank, basis.vectors.size(1));
    const auto* gram = std::ranges::any_of(bases, is_double) ? nullptr : find("gram", rank);
    const auto* once = find("orthonormalise", rank);
    const auto* twice = find("reorthonormalise", rank);
    const bool is_done = launched({gram, once, twice}, [&] {
      const auto lines = gram->tile.at(0), padded = gram->tile.at(1);
      Words lengths;
      for (const auto& basis : bases) lengths.push_back(basis.vectors.size(0));
      auto& of_these = refill.has_value() ? refilled_ : zeroed_;
      const auto [addresses, rows, programs] = of_these.refresh(
          basis_words(bases, lines), std::move(lengths), [&] { return basis_blocks(bases, lines); }, kBasisBlockWords);
      const auto first = launcher_.empty({programs, padded, padded}, at::kDouble);
      const auto second = launcher_.empty({programs, padded, padded}, at::kDouble);
      const int64_t refills = refill.has_value() ? 1 : 0;
      const auto seed = std::bit_cast<int64_t>(refill.value_or(0));
      launcher_.run(*gram, programs, addresses, rows, first);
      launcher_.run(*once, programs, addresses, rows, first, second, epsilon, refills, seed);
      launcher_.run(*twice, programs, addresses, rows, second, first, 0.0, refills, seed);
    });
    if (!is_done) otherwise_->orthogonalise(bases, epsilon, refill);
  }

  const Launcher* launcher() const override { return &launcher_; }

 private:
  // The loaded kernel for the smallest rank that is at least `rank`; null: there is none.
  const LoadedKernel* find(const std::string& form, int64_t rank) const {
    for (auto padded = std::bit_ceil(static_cast<uint64_t>(rank)); padded <= kMostVectors; padded *= 2) {
      const auto* kernel = launcher_.find("fastddp_" + form + "_r" + std::to_string(padded));
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

  Launcher launcher_;
  const std::unique_ptr<LowRankKernels> otherwise_ = make_aten_low_rank_kernels();
  LaunchTables compress_{launcher_}, project_{launcher_}, reconstruct_{launcher_};
  DeviceTable sums_{launcher_};  // project's second launch
  // For P, whose dependent vectors become zero, and for Q, whose are refilled.
  LaunchTables zeroed_{launcher_}, refilled_{launcher_};
};

}  // namespace

std::unique_ptr<LowRankKernels> make_low_rank_kernels(c10::Device device, Purpose purpose) {
  if (device.is_cpu()) return make_cpu_low_rank_kernels();
  if (CudaDriver::of(device.type()) == nullptr) return make_aten_low_rank_kernels();
  return std::make_unique<GpuLowRankKernels>(device, purpose);
}

}  // namespace fastddp
