// The tables that tell PowerSGD's Triton kernels where matrices and bases are, and which part each program works on.
// kernels/low_rank_kernels.py and kernels/orthogonalise_kernels.py say what each word means.
#pragma once

#include "device/device_table.h"
#include "low_rank/kernels.h"

namespace fastddp {

constexpr int64_t kBlockWords = 6;
constexpr int64_t kSumWords = 4;
constexpr int64_t kBasisBlockWords = 3;

// A row for each matrix: addresses, shape and rank. shape_words() has no addresses: the other tables of matrices depend on it.
Words matrix_words(const std::vector<LowRankMatrix>& matrices);
Words shape_words(const std::vector<LowRankMatrix>& matrices);

// A row for each program. A program takes up to `rows` rows, in reconstruct also up to `columns` columns.
Words compress_blocks(const std::vector<LowRankMatrix>& matrices, int64_t rows);
Words reconstruct_blocks(const std::vector<LowRankMatrix>& matrices, int64_t rows, int64_t columns);

// A row for each program of project, which takes up to `columns` columns and some rows.
Words project_blocks(const std::vector<LowRankMatrix>& matrices, int64_t columns);
// A row for each program of sum_partials, which takes up to `elements` elements.
Words sums(const std::vector<LowRankMatrix>& matrices, int64_t columns, int64_t elements);
// How many numbers project writes.
int64_t partial_numbers(const std::vector<LowRankMatrix>& matrices, int64_t columns);

// `lines`: the rows that a program has in flight.
Words basis_words(const std::vector<Basis>& bases, int64_t lines);
Words basis_blocks(const std::vector<Basis>& bases, int64_t lines);

}  // namespace fastddp
