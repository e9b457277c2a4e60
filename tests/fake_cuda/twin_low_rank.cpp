// compress, project, sum_partials and reconstruct: kernels/low_rank_kernels.py, by torch's operators on the CPU.
#include <ATen/ATen.h>

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
  char* before;
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

// The parts of one matrix that one program works on, as tensors. Undefined: there is none.
struct Part {
  at::Tensor gradient, memory, before, p, q;
  const BlockRow& block;
  const MatrixRow& matrix;

  Part(const Launch& launch, int64_t program, c10::ScalarType dtype)
      : block(launch.row<BlockRow>(1, program)), matrix(launch.row<MatrixRow>(0, block.matrix)) {
    gradient = rectangle(launch, matrix.gradient, dtype);
    memory = rectangle(launch, matrix.memory, dtype);
    before = rectangle(launch, matrix.before, dtype);
    p = launch.elements(matrix.p + block.row * matrix.rank, block.rows * matrix.rank, at::kFloat)
            .view({block.rows, matrix.rank});
    q = launch.elements(matrix.q, matrix.rank * matrix.columns, at::kFloat)
            .view({matrix.rank, matrix.columns})
            .narrow(1, block.column, block.columns);
  }

  // M, whichever of the two it is; zeros if there is neither.
  at::Tensor m() const {
    if (!gradient.defined() && !memory.defined()) return at::zeros({block.rows, block.columns});
    return (memory.defined() ? memory : gradient).to(at::kFloat);
  }

 private:
  at::Tensor rectangle(const Launch& launch, char* first, c10::ScalarType dtype) const {
    if (first == nullptr) return {};
    first += (block.row * matrix.columns + block.column) * size_of(dtype);
    const auto elements = block.rows == 0 ? 0 : (block.rows - 1) * matrix.columns + block.columns;
    return launch.elements(first, elements, dtype).as_strided({block.rows, block.columns}, {matrix.columns, 1});
  }
};

void compress(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const Part part(launch, program, dtype);
  if (part.memory.defined()) part.memory.copy_(part.gradient.defined() ? part.before + part.gradient : part.before);
  part.p.copy_(at::mm(part.m(), part.q.t()).mul_(launch.real(2)));
}

void project(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const Part part(launch, program, dtype);
  const auto elements = (part.matrix.rank - 1) * part.matrix.columns + part.block.columns;
  launch.elements(launch.pointer<float>(2) + part.block.partial, elements, at::kFloat)
      .as_strided({part.matrix.rank, part.block.columns}, {part.matrix.columns, 1})
      .copy_(at::mm(part.p.t(), part.m()));
}

void sum_partials(const Launch& launch, int64_t program, c10::ScalarType) {
  const auto& [index, begin, first, spans] = launch.row<SumRow>(1, program);
  const auto& matrix = launch.row<MatrixRow>(0, index);
  const auto numbers = matrix.rank * matrix.columns, count = std::min(kElements, numbers - begin);
  const auto partials = launch.elements(launch.pointer<float>(2) + first, spans * numbers, at::kFloat);
  const auto sum = partials.view({spans, numbers}).narrow(1, begin, count).sum(0).mul_(launch.real(3));
  launch.elements(matrix.q + begin, count, at::kFloat).copy_(sum);
}

void reconstruct(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const Part part(launch, program, dtype);
  const auto product = at::mm(part.p, part.q).to(dtype);
  if (part.memory.defined()) part.memory.sub_(product).nan_to_num_(0, 0, 0);
  if (part.gradient.defined()) part.gradient.copy_(product);
  const auto squares = product.to(at::kFloat).square().sum(at::kDouble);
  const auto odd = at::isfinite(product).logical_not().sum().to(at::kDouble);
  launch.pair(2, program).copy_(at::stack({squares, odd}));
}

}  // namespace

std::optional<Twin> low_rank_twin(const std::string& kernel) {
  static const std::regex pattern("fastddp_(?:sum_partials|(compress|project|reconstruct)_(fp32|fp16|bf16)_r[0-9]+)");
  std::smatch match;
  if (!std::regex_match(kernel, match, pattern)) return std::nullopt;
  const bool sums = !match[1].matched;
  const auto run = sums ? sum_partials : match[1] == "compress" ? compress : match[1] == "project" ? project : reconstruct;
  const auto dtype = sums ? at::kFloat : dtype_of(match[2]);
  return Twin{sums ? size_t{4} : size_t{3}, [=](const Launch& launch, int64_t program) { run(launch, program, dtype); }};
}

}  // namespace fake_cuda
