// Pack and unpack on the CPU. Both are one loop, `convert`: read, scale in fp32 (fp64 for fp64), round, write. It runs at the
// speed of memory. So it touches each byte once, and threads share the elements of a bucket, not its gradients.
#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/vector_x86.h"
#include "pack/kernels.h"
#include "pack/measured.h"

namespace fastddp {
namespace {

// A thread is not worth waking for fewer elements.
constexpr int64_t kGrain = 32768;

template <typename Source, typename Destination>
void convert(const Source* source, Destination* destination, int64_t count, double scale, bool past_caches) {
  using Compute = std::conditional_t<std::is_same_v<Source, double> && std::is_same_v<Destination, double>, double, float>;
  int64_t i = 0;
  if constexpr (!std::is_same_v<Source, double> && !std::is_same_v<Destination, double>) {
    i = vector_convert(source, destination, count, static_cast<float>(scale), past_caches);
  }
  const auto factor = static_cast<Compute>(scale);
  for (; i < count; ++i) {
    destination[i] = static_cast<Destination>(static_cast<Compute>(source[i]) * factor);
  }
}

template <typename Source, typename Destination>
void convert_erased(const void* source, void* destination, int64_t count, double scale, bool past_caches) {
  if (std::is_same_v<Source, Destination> && scale == 1.0) {
    if (source != destination) std::memcpy(destination, source, count * sizeof(Source));
    return;
  }
  convert(static_cast<const Source*>(source), static_cast<Destination*>(destination), count, scale, past_caches);
}

// Elements that are measured at a time: their squares are added up in fp32.
constexpr int64_t kBlock = 8192;

// An element that is not finite makes the sum of squares not finite, and that test is cheaper than a count. So elements are
// counted only if the sum is not finite. The count reads the source, which is unchanged: what is scaled in place is measured
// before.
template <typename Source, typename Destination>
Measured convert_block_measuring(const Source* source, Destination* destination, int64_t count, double scale,
                                 bool past_caches) {
  const bool is_copy = std::is_same_v<Source, Destination> && scale == 1.0;
  const bool is_in_place = static_cast<const void*>(source) == static_cast<const void*>(destination);
  constexpr bool has_loop = !std::is_same_v<Source, double> && !std::is_same_v<Destination, double>;
  if (is_copy || is_in_place || !has_loop) {
    const auto measured = measure_block(source, count);
    if (!is_copy) {
      convert(source, destination, count, scale, past_caches);
    } else if (!is_in_place) {
      copy_bytes(source, destination, count * static_cast<int64_t>(sizeof(Source)), past_caches);
      end_of_copies();
    }
    return measured;
  }
  Measured measured;
  if constexpr (has_loop) {
    const auto factor = static_cast<float>(scale);
    auto i = vector_convert(source, destination, count, factor, past_caches, &measured.sum_of_squares);
    for (; i < count; ++i) {
      const auto value = static_cast<float>(source[i]);
      destination[i] = static_cast<Destination>(value * factor);
      measured.sum_of_squares += static_cast<double>(value) * value;
    }
  }
  return std::isfinite(measured.sum_of_squares) ? measured : measure_block(source, count);
}

template <typename Source, typename Destination>
Measured convert_measuring_erased(const void* source, void* destination, int64_t count, double scale, bool past_caches) {
  Measured measured;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    measured +=
        convert_block_measuring(static_cast<const Source*>(source) + begin, static_cast<Destination*>(destination) + begin,
                                std::min(kBlock, count - begin), scale, past_caches);
  }
  return measured;
}

// Calls `function` with a number of the dtype. Returns null if there are no fast loops. Complex numbers are pairs of real ones.
template <typename Function>
auto for_dtype(c10::ScalarType dtype, const Function& function) -> decltype(function(float())) {
  switch (c10::toRealValueType(dtype)) {
    case at::kFloat:
      return function(float());
    case at::kDouble:
      return function(double());
    case at::kHalf:
      return function(c10::Half());
    case at::kBFloat16:
      return function(c10::BFloat16());
    default:
      return nullptr;
  }
}

// The loops over one pair of dtypes, which move elements, measure what they read, or both.
struct Loops {
  void (*convert)(const void*, void*, int64_t, double, bool);
  Measured (*convert_measuring)(const void*, void*, int64_t, double, bool);
  Measured (*measure)(const void*, int64_t);  // up to kBlock elements
};

// Null where the pair has no fast loop.
const Loops* loops_between(c10::ScalarType source, c10::ScalarType destination) {
  if (c10::isComplexType(source) != c10::isComplexType(destination)) return nullptr;
  return for_dtype(source, [&](auto from) -> const Loops* {
    return for_dtype(destination, [](auto to) -> const Loops* {
      using Source = decltype(from);
      static const Loops loops{
          convert_erased<Source, decltype(to)>, convert_measuring_erased<Source, decltype(to)>,
          [](const void* source, int64_t count) { return measure_block(static_cast<const Source*>(source), count); }};
      return &loops;
    });
  });
}

// A flat array that one loop can convert; `loops` null: write zeros.
struct Run {
  const Loops* loops;
  const char* source;
  char* destination;
  int64_t begin;  // where its elements begin in the sequence of all runs' elements
  int64_t count;
  int64_t source_size;  // bytes an element
  int64_t destination_size;
  size_t member;

  const char* source_at(int64_t element) const { return source + element * source_size; }

  void move(int64_t first, int64_t length, double scale, bool past_caches) const {
    auto* const to = destination + first * destination_size;
    if (loops == nullptr) {
      std::memset(to, 0, length * destination_size);
    } else {
      loops->convert(source_at(first), to, length, scale, past_caches);
    }
  }
};

class Runs {
 public:
  // False if the pair of tensors is not flat: torch's strided loops move it then. To be measured: a tensor and itself.
  bool add(const at::Tensor& source, const at::Tensor& destination, size_t member = 0) {
    const auto* loops = loops_between(source.scalar_type(), destination.scalar_type());
    if (loops == nullptr || !same_dense_layout(source, destination)) return false;
    append(loops, static_cast<const char*>(source.const_data_ptr()), destination, source.element_size(), member);
    return true;
  }

  void add_zeros(const at::Tensor& destination) { append(nullptr, nullptr, destination, 0, 0); }

  void move(double scale) const {
    for_all([&](const Run& run, int64_t first, int64_t count) { run.move(first, count, scale, past_caches(run)); });
  }

  // The same, and measures each source's values before they are scaled.
  void move_and_measure(double scale, SumInOrder& sums) const {
    for_all([&](const Run& run, int64_t first, int64_t count) {
      const auto past = past_caches(run);
      if (run.loops == nullptr) return run.move(first, count, scale, past);
      auto* const destination = run.destination + first * run.destination_size;
      const auto* const source = run.source_at(first);
      sums.add(source, run.loops->convert_measuring(source, destination, count, scale, past), run.member);
    });
  }

  // Measures the sources, by blocks that are still in cache if it also copies them.
  void measure(SumInOrder& sums, bool copies = false) const {
    for_all([&](const Run& run, int64_t first, int64_t count) {
      Measured part;
      for (auto begin = first; begin < first + count; begin += kBlock) {
        const auto length = std::min(kBlock, first + count - begin);
        if (copies) run.move(begin, length, 1.0, past_caches(run));
        part += run.loops->measure(run.source_at(begin), length);
      }
      sums.add(run.source_at(first), part, run.member);
    });
  }

 private:
  // Calls `work` for pieces of runs. Every thread gets about as many elements: the blocks that begin among them, so that sums over
  // blocks are the same however many threads there are.
  template <typename Work>
  void for_all(const Work& work) const {
    at::parallel_for(0, total_, kGrain, [&](int64_t begin, int64_t end) {
      auto run = std::upper_bound(runs_.begin(), runs_.end(), begin,
                                  [](int64_t element, const Run& other) { return element < other.begin; });
      for (--run; run != runs_.end() && run->begin < end; ++run) {
        const auto first = blocks_before(std::max(begin, run->begin) - run->begin);
        const auto last = std::min(blocks_before(end - run->begin), run->count);
        if (first < last) work(*run, first, last - first);
      }
    });
  }

  void append(const Loops* loops, const char* source, const at::Tensor& destination, int64_t source_size, size_t member) {
    const int64_t parts = destination.is_complex() ? 2 : 1;
    const auto count = destination.numel() * parts;
    runs_.push_back({loops, source, static_cast<char*>(destination.data_ptr()), total_, count, source_size / parts,
                     static_cast<int64_t>(destination.element_size()) / parts, member});
    total_ += count;
  }

  // Note [Stores past the caches]
  static bool past_caches(const Run& run) {
    return run.count * run.destination_size >= kStreamFromBytes && run.source != run.destination;
  }

  // Of the blocks that begin before an element of a run: where the last one ends.
  static int64_t blocks_before(int64_t element) { return (element + kBlock - 1) / kBlock * kBlock; }

  std::vector<Run> runs_;
  int64_t total_ = 0;
};

class CpuKernels : public Kernels {
 public:
  void pack(const std::vector<Slot>& slots, double scale, size_t, LocalSums* sums) override {
    Runs runs;
    std::vector<Slot> strided;
    for (const auto& slot : slots) {
      if (!slot.gradient.defined()) {
        runs.add_zeros(slot.view);
      } else if (!runs.add(slot.gradient, slot.view, slot.member)) {
        strided.push_back(slot);
      }
    }
    if (sums == nullptr) {
      runs.move(scale);
    } else {
      SumInOrder measured;
      runs.move_and_measure(scale, measured);
      sums->add(measured);
      measure_with_operators(strided, *sums);  // before gradients in the wire are scaled there
    }
    pack_with_operators(strided, scale);
  }

  void measure_gradients(const std::vector<Slot>& slots, LocalSums& sums, size_t) override {
    Runs runs;
    std::vector<Slot> strided;
    for (const auto& slot : slots) {
      if (slot.gradient.defined() && !runs.add(slot.gradient, slot.gradient, slot.member)) strided.push_back(slot);
    }
    SumInOrder measured;
    runs.measure(measured);
    sums.add(measured);
    measure_with_operators(strided, sums);
  }

  at::Tensor unpack(const std::vector<Slot>& slots, bool measuring) override {
    Runs runs;
    std::vector<Slot> strided;
    for (const auto& slot : slots) {
      if (slot.gradient.defined() && !runs.add(slot.view, slot.gradient)) strided.push_back(slot);
    }
    unpack_with_operators(strided);
    if (!measuring || !strided.empty()) {
      runs.move(1.0);
      return {};
    }
    SumInOrder measured;
    runs.measure(measured, /*copies=*/true);
    return as_tensor(measured.total());
  }

  at::Tensor measure(const at::Tensor& wire) override {
    Runs runs;
    runs.add(wire, wire);
    SumInOrder measured;
    runs.measure(measured);
    return as_tensor(measured.total());
  }

  bool pack_on_arrival() const override { return true; }
};

}  // namespace

at::Tensor as_tensor(const Measured& measured) {
  return at::tensor({measured.sum_of_squares, static_cast<double>(measured.not_finite)}, at::kDouble);
}

std::unique_ptr<Kernels> make_cpu_kernels() {
  return std::make_unique<CpuKernels>();
}

}  // namespace fastddp
