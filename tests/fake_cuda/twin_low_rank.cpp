// compress, project, sum_partials and reconstruct: kernels/low_rank_kernels.py, by torch's operators on the CPU.
#include <ATen/ATen.h>

#include <map>
#include <regex>

#include "twin.h"

namespace fake_cuda {
namespace {

constexpr int64_t kElements = 128;  // of one program of sum_partials

// Rows of the tables.
struct MatrixRow {
  char* gradient;
  char* memory;
  float* p;
  float* q;
  int64_t rows;
  int64_t columns;
  int64_t rank;
};
struct BlockRow {
  int64_t matrix;
  int64_t row;
  int64_t rows;
  int64_t column;
  int64_t columns;
  int64_t partial;
};
struct SumRow {
  int64_t matrix;
  int64_t begin;
  int64_t first;
  int64_t spans;
};

// The parts of one matrix that one program works on, as tensors.
class Part {
 public:
  Part(const Launch& launch, const MatrixRow& matrix, const BlockRow& block, c10::ScalarType dtype)
      : launch_(launch), matrix_(*launch.checked(&matrix, 1)), block_(block), dtype_(dtype) {}

  at::Tensor gradient() const { return rectangle(matrix_.gradient); }
  at::Tensor memory() const { return rectangle(matrix_.memory); }
  bool has_gradient() const { return matrix_.gradient != nullptr; }
  bool has_memory() const { return matrix_.memory != nullptr; }
  // M, whichever of the two it is; zeros if there is neither.
  at::Tensor m() const {
    if (!has_gradient() && !has_memory()) return at::zeros({block_.rows, block_.columns});
    return has_memory() ? memory() : gradient();
  }
  at::Tensor p() const {
    auto* first = launch_.checked(matrix_.p + block_.row * matrix_.rank, block_.rows * matrix_.rank);
    return at::from_blob(first, {block_.rows, matrix_.rank}, at::kFloat);
  }
  at::Tensor q() const {
    launch_.checked(matrix_.q, matrix_.rank * matrix_.columns);
    return at::from_blob(matrix_.q, {matrix_.rank, matrix_.columns}, at::kFloat)
        .narrow(1, block_.column, block_.columns);
  }
  at::Tensor partial(float* partials) const {
    auto* first = partials + block_.partial;
    launch_.checked(first, (matrix_.rank - 1) * matrix_.columns + block_.columns);
    return at::from_blob(first, {matrix_.rank, block_.columns}, {matrix_.columns, 1}, at::kFloat);
  }

 private:
  at::Tensor rectangle(char* matrix) const {
    const auto size = static_cast<int64_t>(c10::elementSize(dtype_));
    auto* first = matrix + (block_.row * matrix_.columns + block_.column) * size;
    if (block_.rows > 0 && block_.columns > 0) {
      launch_.checked(first, ((block_.rows - 1) * matrix_.columns + block_.columns) * size);
    }
    return at::from_blob(first, {block_.rows, block_.columns}, {matrix_.columns, 1}, dtype_);
  }

  const Launch& launch_;
  const MatrixRow& matrix_;
  const BlockRow& block_;
  const c10::ScalarType dtype_;
};

Part part_of(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const auto& block = launch.pointer<const BlockRow>(1)[program];
  return {launch, launch.pointer<const MatrixRow>(0)[block.matrix], block, dtype};
}

void compress(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const auto part = part_of(launch, program, dtype);
  if (part.has_memory() && part.has_gradient()) part.memory().add_(part.gradient());
  part.p().copy_(at::mm(part.m().to(at::kFloat), part.q().t()).mul_(launch.real(2)));
}

void project(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const auto part = part_of(launch, program, dtype);
  part.partial(launch.pointer<float>(2)).copy_(at::mm(part.p().t(), part.m().to(at::kFloat)));
}

void sum_partials(const Launch& launch, int64_t program, c10::ScalarType) {
  const auto& [index, begin, first, spans] = launch.pointer<const SumRow>(1)[program];
  const auto& matrix = *launch.checked(launch.pointer<const MatrixRow>(0) + index, 1);
  const auto numbers = matrix.rank * matrix.columns, count = std::min(kElements, numbers - begin);
  auto* partials = launch.checked(launch.pointer<float>(2) + first, spans * numbers);
  const auto all = at::from_blob(partials, {spans, numbers}, at::kFloat).narrow(1, begin, count);
  auto* q = launch.checked(matrix.q + begin, count);
  at::from_blob(q, {count}, at::kFloat).copy_(all.sum(0).mul_(launch.real(3)));
}

void reconstruct(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const auto part = part_of(launch, program, dtype);
  const auto product = at::mm(part.p(), part.q()).to(dtype);
  if (part.has_memory()) part.memory().sub_(product).nan_to_num_(0, 0, 0);
  if (part.has_gradient()) part.gradient().copy_(product);
  const auto squares = product.to(at::kFloat).square().sum(at::kDouble);
  const auto odd = at::isfinite(product).logical_not().sum().to(at::kDouble);
  at::from_blob(launch.pointer<double>(2) + 2 * program, {2}, at::kDouble).copy_(at::stack({squares, odd}));
}

std::vector<Named> memory_of_tables(const Launch& launch, size_t words, size_t bytes_of_partials) {
  std::vector<Named> memory{{"the table of matrices", launch.pointer<void>(0), sizeof(MatrixRow)},
                            {"the table of programs", launch.pointer<void>(1), launch.programs * words * 8}};
  if (bytes_of_partials > 0) memory.push_back({"partial results", launch.pointer<void>(2), bytes_of_partials});
  return memory;
}

}  // namespace

std::optional<Twin> low_rank_twin(const std::string& kernel) {
  constexpr size_t block_words = 6, sum_words = 4;
  if (kernel == "fastddp_sum_partials") {
    return Twin{4, [](const Launch& launch) { return memory_of_tables(launch, sum_words, 1); },
                [](const Launch& launch, int64_t program) { sum_partials(launch, program, at::kFloat); }};
  }
  static const std::regex pattern("fastddp_(compress|project|reconstruct)_(fp32|fp16|bf16)_r[0-9]+");
  std::smatch match;
  if (!std::regex_match(kernel, match, pattern)) return std::nullopt;
  const auto dtype = match[2] == "fp32" ? at::kFloat : match[2] == "fp16" ? at::kHalf : at::kBFloat16;
  const auto form = match[1].str();
  const auto run = form == "compress" ? compress : form == "project" ? project : reconstruct;
  const auto memory = [form](const Launch& launch) {
    const size_t bytes = form == "compress" ? 0 : form == "project" ? 1 : launch.programs * 2 * sizeof(double);
    return memory_of_tables(launch, block_words, bytes);
  };
  return Twin{3, memory, [run, dtype](const Launch& launch, int64_t program) { run(launch, program, dtype); }};
}

}  // namespace fake_cuda
