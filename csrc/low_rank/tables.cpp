#include "low_rank/tables.h"

#include <algorithm>

namespace fastddp {
namespace {

struct Shape {
  int64_t rows;
  int64_t columns;
  int64_t rank;
};

Shape shape_of(const LowRankMatrix& matrix) {
  return {matrix.p.size(0), matrix.q.size(1), matrix.p.size(1)};
}

int64_t ceiling(int64_t dividend, int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

int64_t address(const at::Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<int64_t>(tensor.const_data_ptr()) : 0;
}

// How many rows of a matrix one program of project takes. About `programs` programs share a matrix, but each takes enough rows
// that the partial sums are small compared to the matrix.
int64_t span_rows(const Shape& shape, int64_t columns) {
  constexpr int64_t programs = 512, unit = 32, least = 64;
  const auto wanted = ceiling(programs, std::max<int64_t>(1, ceiling(shape.columns, columns)));
  return std::max(ceiling(shape.rows, wanted * unit) * unit, least);
}

// How many elements of each vector one program takes. Every program reads all partial sums of its basis, so a basis has
// at most `most` programs.
int64_t block_rows(int64_t length, int64_t lines) {
  constexpr int64_t most = 128, least = 64;
  return std::max(ceiling(length, most * lines) * lines, std::max(lines, least));
}

// Cuts each matrix into rectangles of at most so many rows and columns. The last word says where project's partial sums go.
template <typename RowsOf>
Words rectangles(const std::vector<LowRankMatrix>& matrices, const RowsOf& rows_of, int64_t columns) {
  Words words;
  int64_t first = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto shape = shape_of(matrices[i]);
    const int64_t rows = rows_of(shape);
    for (int64_t row = 0; row < shape.rows; row += rows) {
      for (int64_t column = 0; column < shape.columns; column += columns) {
        words.insert(words.end(), {static_cast<int64_t>(i), row, std::min(rows, shape.rows - row), column,
                                   std::min(columns, shape.columns - column), first + column});
      }
      first += shape.rank * shape.columns;
    }
  }
  return words;
}

}  // namespace

Words matrix_words(const std::vector<LowRankMatrix>& matrices) {
  Words words;
  for (const auto& matrix : matrices) {
    const auto [rows, columns, rank] = shape_of(matrix);
    words.insert(words.end(), {address(matrix.gradient), address(matrix.memory), address(matrix.p), address(matrix.q), rows,
                               columns, rank, address(matrix.before)});
  }
  return words;
}

Words shape_words(const std::vector<LowRankMatrix>& matrices) {
  Words words;
  for (const auto& matrix : matrices) {
    const auto [rows, columns, rank] = shape_of(matrix);
    words.insert(words.end(), {rows, columns, rank});
  }
  return words;
}

// A program owns whole rows, and writes P even if the rows have no columns.
Words compress_blocks(const std::vector<LowRankMatrix>& matrices, int64_t rows) {
  Words words;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto shape = shape_of(matrices[i]);
    for (int64_t row = 0; row < shape.rows; row += rows) {
      words.insert(words.end(), {static_cast<int64_t>(i), row, std::min(rows, shape.rows - row), 0, shape.columns, 0});
    }
  }
  return words;
}

Words reconstruct_blocks(const std::vector<LowRankMatrix>& matrices, int64_t rows, int64_t columns) {
  return rectangles(matrices, [&](const Shape&) { return rows; }, columns);
}

Words project_blocks(const std::vector<LowRankMatrix>& matrices, int64_t columns) {
  return rectangles(matrices, [&](const Shape& shape) { return span_rows(shape, columns); }, columns);
}

Words sums(const std::vector<LowRankMatrix>& matrices, int64_t columns, int64_t elements) {
  Words words;
  int64_t first = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto shape = shape_of(matrices[i]);
    const auto spans = ceiling(shape.rows, span_rows(shape, columns)), numbers = shape.rank * shape.columns;
    for (int64_t begin = 0; begin < numbers; begin += elements) {
      words.insert(words.end(), {static_cast<int64_t>(i), begin, first, spans});
    }
    first += spans * numbers;
  }
  return words;
}

int64_t partial_numbers(const std::vector<LowRankMatrix>& matrices, int64_t columns) {
  int64_t numbers = 0;
  for (const auto& matrix : matrices) {
    const auto shape = shape_of(matrix);
    numbers += ceiling(shape.rows, span_rows(shape, columns)) * shape.rank * shape.columns;
  }
  return numbers;
}

Words basis_words(const std::vector<Basis>& bases, int64_t lines) {
  Words words;
  int64_t first = 0;
  for (const auto& basis : bases) {
    const auto& vectors = basis.vectors;
    const auto blocks = ceiling(vectors.size(0), block_rows(vectors.size(0), lines));
    words.insert(words.end(), {address(vectors), vectors.size(0), vectors.size(1), vectors.stride(0), vectors.stride(1),
                               static_cast<int64_t>(basis.number), first, blocks});
    first += blocks;
  }
  return words;
}

Words basis_blocks(const std::vector<Basis>& bases, int64_t lines) {
  Words words;
  for (size_t i = 0; i < bases.size(); ++i) {
    const auto length = bases[i].vectors.size(0);
    const auto step = block_rows(length, lines);
    for (int64_t row = 0; row < length; row += step) {
      words.insert(words.end(), {static_cast<int64_t>(i), row, std::min(step, length - row)});
    }
  }
  return words;
}

}  // namespace fastddp
