// The vector loops of low_rank_kernels_cpu.cpp, sixteen columns at a time. low_rank_x86.h includes this file once for each width
// of vectors, in a namespace that has the type Sixteen, its operations and FASTDDP_TARGET. Each loop does the columns that fill
// whole vectors and leaves the rest to its caller. Both widths write the same bits.

// sums[c] += sum over the first `columns` (a multiple of 16) of M[j] * q[c][j] for R vectors of q. M is a + b, rounded to T; a
// alone if b is null; b alone if a is null. It is written to `memory`, unless that is null.
template <int R, bool kStream, typename T>
FASTDDP_TARGET void dot_rows(const T* a, const T* b, T* memory, const float* q, int64_t q_stride, int64_t columns,
                             float* sums) {
  Sixteen totals[R];
  for (int c = 0; c < R; ++c) totals[c] = zero();
  const auto loop = [&](auto read) FASTDDP_TARGET {
    for (int64_t j = 0; j < columns; j += kColumnsAtOnce) {
      const Sixteen m = read(j);
      for (int c = 0; c < R; ++c) totals[c] = fma(m, load16(q + c * q_stride + j), totals[c]);
    }
  };
  if (memory == nullptr) {
    const T* only = a != nullptr ? a : b;
    loop([&](int64_t j) FASTDDP_TARGET { return load16(only + j); });
  } else {
    loop([&](int64_t j) FASTDDP_TARGET {
      fetch(b + j);
      auto m = load16(b + j);
      if (a != nullptr) {
        fetch(a + j);
        m = add(m, load16(a + j));
      }
      store<kStream>(memory + j, m);
      return std::is_same_v<T, float> ? m : load16(memory + j);  // as rounded to T
    });
  }
  for (int c = 0; c < R; ++c) sums[c] += static_cast<float>(sum8(_mm256_add_ps(low(totals[c]), high(totals[c]))));
}

// q[c][j] += sum over four rows i of p[i][c] * M[i][j]. Reads and writes the accumulators in q once for four rows.
template <int R, typename T>
FASTDDP_TARGET void add_four_rows(const T* m, int64_t m_stride, const float* p, int64_t p_stride, int64_t columns,
                                  float* q, int64_t q_stride) {
  for (int64_t j = 0; j < columns; j += kColumnsAtOnce) {
    Sixteen rows[4];
    for (int i = 0; i < 4; ++i) {
      fetch(m + i * m_stride + j);
      rows[i] = load16(m + i * m_stride + j);
    }
    for (int c = 0; c < R; ++c) {
      auto sums = load16(q + c * q_stride + j);
      for (int i = 0; i < 4; ++i) sums = fma(broadcast(p + i * p_stride + c), rows[i], sums);
      store<false>(q + c * q_stride + j, sums);
    }
  }
}

// gradient[j] = sum over c of p[c] * q[c][j], for all `rank` vectors; memory[j] -= gradient[j], if there is memory. Adds the
// gradient's squares to `sum_of_squares`, and counts its elements that are not finite.
template <int R, bool kStream, typename T>
FASTDDP_TARGET void product_row(T* gradient, T* memory, const float* p, int rank, const float* q, int64_t q_stride,
                                int64_t columns, double& sum_of_squares, int64_t& not_finite) {
  const int vectors = R > 0 ? R : rank;
  auto squares = zero(), differences = zero();  // a number minus itself: 0, or NaN if it is not finite
  for (int64_t j = 0; j < columns; j += kColumnsAtOnce) {
    auto sum = zero();
    for (int c = 0; c < vectors; ++c) sum = fma(broadcast(p + c), load16(q + c * q_stride + j), sum);
    store<kStream>(gradient + j, sum);
    if constexpr (!std::is_same_v<T, float>) sum = load16(gradient + j);  // as rounded to T
    squares = fma(sum, sum, squares);
    differences = add(differences, sub(sum, sum));
    if (memory == nullptr) continue;
    fetch(memory + j);
    store<false>(memory + j, finite_or_zero(sub(load16(memory + j), sum)));
  }
  sum_of_squares += sum8(low(squares)) + sum8(high(squares));
  const auto bad = _mm256_cmp_ps(_mm256_add_ps(low(differences), high(differences)), _mm256_setzero_ps(), _CMP_NEQ_UQ);
  if (_mm256_movemask_ps(bad) == 0) return;
  for (int64_t j = 0; j < columns; ++j) not_finite += !std::isfinite(static_cast<float>(gradient[j]));
}
