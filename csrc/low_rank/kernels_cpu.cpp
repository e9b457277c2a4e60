// PowerSGD's kernels on the CPU: one pass over the gradient each, at the speed of memory.
#include "low_rank/kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "low_rank/orthogonalise_cpu.h"
#include "low_rank/x86.h"
#include "pack/measured.h"

namespace fastddp {
namespace {

constexpr int64_t kGrain = 32768;      // a thread is worth waking for this many elements
constexpr int64_t kColumnTile = 2048;  // columns of q whose accumulators stay in cache

// One matrix by plain pointers. T: the gradient's type. C: the type of P, Q and all arithmetic.
template <typename T, typename C>
struct View {
  View(const LowRankMatrix& matrix, bool vectorises)
      : rows(matrix.p.size(0)),
        columns(matrix.q.size(1)),
        rank(static_cast<int>(matrix.q.size(0))),
        gradient(matrix.gradient.defined() ? matrix.gradient.data_ptr<T>() : nullptr),
        memory(matrix.memory.defined() ? matrix.memory.data_ptr<T>() : nullptr),
        before(matrix.before.defined() ? matrix.before.data_ptr<T>() : nullptr),
        p(matrix.p.data_ptr<C>()),
        q(matrix.q.data_ptr<C>()),
        vector_columns(vectorises && std::is_same_v<C, float> ? columns / kColumnsAtOnce * kColumnsAtOnce : 0) {}

  T* m() const { return memory != nullptr ? memory : gradient; }

  int64_t rows, columns;
  int rank;
  T* gradient;
  T* memory;
  const T* before;
  C* p;
  C* q;
  int64_t vector_columns;  // scalar loops do the other columns
};

// Calls function(how many vectors to do at once, the first of them) until all `rank` vectors are done.
template <typename Function>
void by_groups(int rank, const Function& function) {
  int c = 0;
  for (; c + 8 <= rank; c += 8) function(std::integral_constant<int, 8>(), c);
  for (; c + 4 <= rank; c += 4) function(std::integral_constant<int, 4>(), c);
  for (; c + 2 <= rank; c += 2) function(std::integral_constant<int, 2>(), c);
  for (; c < rank; ++c) function(std::integral_constant<int, 1>(), c);
}

// Note [Stores past the caches]. 16-bit numbers are read again at once.
template <typename T, typename C>
bool streams(const View<T, C>& view, const T* written) {
  return std::is_same_v<T, float> && reinterpret_cast<uintptr_t>(written) % 32 == 0 &&
         view.rows * view.columns * static_cast<int64_t>(sizeof(T)) >= kStreamFromBytes;
}

template <typename T, typename C>
void compress_row(const View<T, C>& view, int64_t row, C scale) {
  const auto first = row * view.columns;
  T* gradient = view.gradient == nullptr ? nullptr : view.gradient + first;
  T* memory = view.memory == nullptr ? nullptr : view.memory + first;
  const T* before = view.before == nullptr ? nullptr : view.before + first;
  const bool adds = memory != nullptr && gradient != nullptr;
  if (memory != nullptr && !adds && before != memory) std::copy_n(before, view.columns, memory);
  C sums[kMostVectors] = {};
#if defined(__x86_64__)
  if constexpr (std::is_same_v<C, float>) {
    by_groups(view.vector_columns > 0 ? view.rank : 0, [&](auto vectors, int c) {
      const auto dot = [&](auto stream, const T* from, const T* earlier, T* to) {
        dot_rows<vectors.value, stream.value>(from, earlier, to, view.q + c * view.columns, view.columns, view.vector_columns,
                                              sums + c);
      };
      // The first group writes M to memory. The other groups read it there.
      if (!adds || c > 0) return dot(std::false_type(), memory != nullptr ? memory : gradient, nullptr, nullptr);
      const bool past_caches = before != memory && view.rank <= vectors.value && streams(view, memory);
      past_caches ? dot(std::true_type(), gradient, before, memory) : dot(std::false_type(), gradient, before, memory);
    });
  }
#endif
  for (auto j = view.vector_columns; j < view.columns; ++j) {
    if (adds) memory[j] = static_cast<T>(static_cast<C>(before[j]) + static_cast<C>(gradient[j]));
    const auto m = static_cast<C>(memory != nullptr ? memory[j] : gradient[j]);
    for (int c = 0; c < view.rank; ++c) sums[c] += m * view.q[c * view.columns + j];
  }
  for (int c = 0; c < view.rank; ++c) view.p[row * view.rank + c] = scale * sums[c];
}

// Does columns [begin, end). Both are multiples of 16, except at the last column.
template <typename T, typename C>
void project_columns(const View<T, C>& view, int64_t begin, int64_t end, C scale) {
  const auto* m = view.m();
  for (int c = 0; c < view.rank; ++c) std::fill(view.q + c * view.columns + begin, view.q + c * view.columns + end, C(0));
  const auto vector_end = std::max(begin, std::min(end, view.vector_columns));
  int64_t row = 0;
#if defined(__x86_64__)
  if constexpr (std::is_same_v<C, float>) {
    for (; row + 4 <= view.rows && vector_end > begin; row += 4) {
      by_groups(view.rank, [&](auto vectors, int c) {
        add_four_rows<vectors.value>(m + row * view.columns + begin, view.columns, view.p + row * view.rank + c, view.rank,
                                     vector_end - begin, view.q + c * view.columns + begin, view.columns);
      });
    }
  }
#endif
  const auto add = [&](int64_t i, int64_t first, int64_t last) {
    for (int c = 0; c < view.rank; ++c) {
      const auto factor = view.p[i * view.rank + c];
      auto* q = view.q + c * view.columns;
      for (auto j = first; j < last; ++j) q[j] += factor * static_cast<C>(m[i * view.columns + j]);
    }
  };
  for (int64_t i = 0; i < view.rows; ++i) add(i, i < row ? vector_end : begin, end);
  if (scale == C(1)) return;
  for (int c = 0; c < view.rank; ++c) {
    for (auto j = begin; j < end; ++j) view.q[c * view.columns + j] *= scale;
  }
}

#if defined(__x86_64__)
template <typename T>
void product_vectors(const View<T, float>& view, T* gradient, T* memory, const float* p, Measured& measured) {
  const auto run = [&](auto vectors, auto stream) {
    product_row<vectors.value, stream.value>(gradient, memory, p, view.rank, view.q, view.columns, view.vector_columns,
                                             measured.sum_of_squares, measured.not_finite);
  };
  const auto with_rank = [&](auto stream) {
    switch (view.rank) {
      case 1:
        return run(std::integral_constant<int, 1>(), stream);
      case 2:
        return run(std::integral_constant<int, 2>(), stream);
      case 4:
        return run(std::integral_constant<int, 4>(), stream);
      default:
        return run(std::integral_constant<int, 0>(), stream);
    }
  };
  streams(view, gradient) ? with_rank(std::true_type()) : with_rank(std::false_type());
}
#endif

template <typename T, typename C>
void reconstruct_row(const View<T, C>& view, int64_t row, Measured& measured) {
  T* gradient = view.gradient + row * view.columns;
  T* memory = view.memory == nullptr ? nullptr : view.memory + row * view.columns;
  const C* p = view.p + row * view.rank;
#if defined(__x86_64__)
  if constexpr (std::is_same_v<C, float>) {
    if (view.vector_columns > 0) product_vectors(view, gradient, memory, p, measured);
  }
#endif
  for (auto j = view.vector_columns; j < view.columns; ++j) {
    C sum = 0;
    for (int c = 0; c < view.rank; ++c) sum += p[c] * view.q[c * view.columns + j];
    gradient[j] = static_cast<T>(sum);
    if (memory == nullptr) continue;
    const auto error = static_cast<C>(memory[j]) - static_cast<C>(gradient[j]);
    memory[j] = static_cast<T>(std::isfinite(error) ? error : C(0));
  }
  measured += measure_values(gradient + view.vector_columns, view.columns - view.vector_columns);
}

template <typename Function>
void dispatch(const LowRankMatrix& matrix, bool vectorises, const Function& function) {
  switch (matrix.gradient.defined() ? matrix.gradient.scalar_type() : matrix.memory.scalar_type()) {
    case at::kFloat:
      return function(View<float, float>(matrix, vectorises));
    case at::kHalf:
      return function(View<c10::Half, float>(matrix, vectorises));
    case at::kBFloat16:
      return function(View<c10::BFloat16, float>(matrix, vectorises));
    case at::kDouble:
      return function(View<double, double>(matrix, vectorises));
    default:
      TORCH_CHECK_VALUE(false, "fastddp: PowerSGD compresses fp32, fp16, bf16 and fp64 gradients only");
  }
}

template <typename View, typename Function>
void for_rows(const View& view, const Function& function) {
  const auto grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, view.columns));
  at::parallel_for(0, view.rows, grain, function);
}

class CpuLowRankKernels : public LowRankKernels {
 public:
  explicit CpuLowRankKernels(bool vectorises) : vectorises_(vectorises) {}

  void compress(const std::vector<LowRankMatrix>& matrices, double scale) override {
    for (const auto& matrix : matrices) {
      dispatch(matrix, vectorises_, [&](const auto& view) {
        for_rows(view, [&](int64_t begin, int64_t end) {
          for (auto row = begin; row < end; ++row) compress_row(view, row, static_cast<std::decay_t<decltype(*view.p)>>(scale));
        });
      });
    }
  }

  void project(const std::vector<LowRankMatrix>& matrices, double scale) override {
    for (const auto& matrix : matrices) {
      dispatch(matrix, vectorises_, [&](const auto& view) {
        // A tile is whole vectors. It has fewer columns if the rank is high or there are many threads.
        const auto share = (view.columns + at::get_num_threads() - 1) / at::get_num_threads();
        const auto most = std::min(kColumnTile * 4 / std::max(view.rank, 4), share);
        const auto tile = std::max<int64_t>(kColumnsAtOnce * 4, (most + kColumnsAtOnce - 1) / kColumnsAtOnce * kColumnsAtOnce);
        at::parallel_for(0, (view.columns + tile - 1) / tile, 1, [&](int64_t begin, int64_t end) {
          for (auto i = begin; i < end; ++i) {
            project_columns(view, i * tile, std::min(view.columns, (i + 1) * tile),
                            static_cast<std::decay_t<decltype(*view.p)>>(scale));
          }
        });
      });
    }
  }

  at::Tensor reconstruct(const std::vector<LowRankMatrix>& matrices) override {
    SumInOrder all;
    for (const auto& matrix : matrices) {
      TORCH_CHECK(matrix.gradient.defined(), kNoGradient);
      dispatch(matrix, vectorises_, [&](const auto& view) {
        for_rows(view, [&](int64_t begin, int64_t end) {
          Measured part;
          for (auto row = begin; row < end; ++row) reconstruct_row(view, row, part);
          all.add(view.gradient + begin * view.columns, part);
        });
      });
    }
    return as_tensor(all.total());
  }

  void orthogonalise(const std::vector<Basis>& bases, double epsilon, std::optional<uint64_t> refill) override {
    at::parallel_for(0, static_cast<int64_t>(bases.size()), 1, [&](int64_t begin, int64_t end) {
      for (auto i = begin; i < end; ++i) orthogonalise_on_cpu(bases[i], epsilon, refill);
    });
  }

 private:
  const bool vectorises_;
};

}  // namespace

std::unique_ptr<LowRankKernels> make_cpu_low_rank_kernels(int64_t most_vector_bits) {
  return std::make_unique<CpuLowRankKernels>(most_vector_bits >= 256 && has_fma());
}

}  // namespace fastddp
