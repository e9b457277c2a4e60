// Block8 on the CPU: one pass each. A block stays in the first cache between its two loops: its largest number, then its bytes.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "codec/block8_kernels.h"
#include "codec/block8_numbers.h"
#include "pack/measured.h"

namespace fastddp {
namespace {

constexpr int64_t kRunBlocks = 32;  // that one thread does one behind the other
constexpr int64_t kGrainRuns = 4;   // that are worth waking a thread

// What the loops over one block are, for one format: for today's CPUs, or for the baseline.
struct BlockLoops {
  int32_t (*add_error)(const float* gradient, const float* error, float scale, float* y, int64_t count);
  // `error` is never null: loops with such a choice in them become no vectors.
  float (*encode)(const float* y, int32_t most, float* error, uint8_t* bytes, int64_t count, bool adds,
                  const Rounding& rounding, uint32_t first);
  void (*decode)(const uint8_t* bytes, float scale, float* values, int64_t count);
  int32_t (*add)(const uint8_t* bytes, float scale, float* sums, int64_t count);
  void (*give_back)(const uint8_t* bytes, float of_block, const float* gradient, float scale, float* error,
                    int64_t count);
};

template <typename Number>
FASTDDP_INLINE float encode_any(const float* y, int32_t most, float* error, uint8_t* bytes, int64_t count, bool adds,
                                const Rounding& rounding, uint32_t first) {
  const auto key = rounding ? rounding->key : 0;
  if (adds) {
    return rounding ? encode_block<Number, true, true>(y, most, error, bytes, count, key, first)
                    : encode_block<Number, false, true>(y, most, error, bytes, count, key, first);
  }
  return rounding ? encode_block<Number, true, false>(y, most, error, bytes, count, key, first)
                  : encode_block<Number, false, false>(y, most, error, bytes, count, key, first);
}

// The same functions twice: in a function for newer CPUs the compiler makes wider vectors of what is inlined into it.
#define FASTDDP_BLOCK_LOOPS(name, target)                                                                          \
  template <typename Number>                                                                                       \
  struct name {                                                                                                    \
    target static int32_t add_error(const float* gradient, const float* error, float scale, float* y, int64_t n) { \
      return fastddp::add_error(gradient, error, scale, y, n);                                                     \
    }                                                                                                              \
    target static float encode(const float* y, int32_t most, float* error, uint8_t* bytes, int64_t n, bool adds,   \
                               const Rounding& rounding, uint32_t first) {                                         \
      return encode_any<Number>(y, most, error, bytes, n, adds, rounding, first);                                  \
    }                                                                                                              \
    target static void decode(const uint8_t* bytes, float scale, float* values, int64_t n) {                       \
      decode_block<Number>(bytes, scale, values, n);                                                               \
    }                                                                                                              \
    target static int32_t add(const uint8_t* bytes, float scale, float* sums, int64_t n) {                         \
      return add_block<Number>(bytes, scale, sums, n);                                                             \
    }                                                                                                              \
    target static void give_back(const uint8_t* bytes, float of_block, const float* gradient, float scale,         \
                                 float* error, int64_t n) {                                                        \
      give_back_block<Number>(bytes, of_block, gradient, scale, error, n);                                         \
    }                                                                                                              \
    static constexpr BlockLoops loops{add_error, encode, decode, add, give_back};                                  \
  };

FASTDDP_BLOCK_LOOPS(OfBaseline, )
#if defined(__x86_64__)
FASTDDP_BLOCK_LOOPS(OfAvx2, FASTDDP_AVX2)
#endif

template <typename Number>
const BlockLoops& loops_of() {
#if defined(__x86_64__)
  if (has_avx2()) return OfAvx2<Number>::loops;
#endif
  return OfBaseline<Number>::loops;
}

const BlockLoops& loops_of(Block8::Number number) {
  switch (number) {
    case Block8::Number::e4m3:
      return loops_of<E4m3>();
    case Block8::Number::e5m2:
      return loops_of<E5m2>();
    case Block8::Number::int8:
      break;
  }
  return loops_of<Int8>();
}

// Some blocks of one gradient.
struct BlockRun {
  const at::Tensor* gradient;
  int64_t begin;  // element
  int64_t count;
  int64_t block;  // in the wire
};

// Calls `function` with a number of the gradient's dtype.
template <typename Function>
void for_gradient_dtype(const at::Tensor& gradient, const Function& function) {
  switch (gradient.scalar_type()) {
    case at::kFloat:
      return function(float());
    case at::kHalf:
      return function(c10::Half());
    case at::kBFloat16:
      return function(c10::BFloat16());
    default:
      TORCH_CHECK_TYPE(false, "fastddp: 8 bits are made of gradients of fp32, fp16 or bf16, not of ",
                       gradient.scalar_type());
  }
}

template <typename Source, typename Destination>
void convert_numbers(const Source* source, Destination* destination, int64_t count) {
  for (auto i = vector_convert(source, destination, count, 1.0f, false); i < count; ++i) {
    destination[i] = static_cast<Destination>(static_cast<float>(source[i]));
  }
}

class CpuBlock8Kernels : public Block8Kernels {
 public:
  explicit CpuBlock8Kernels(Block8 format) : format_(format), loops_(loops_of(format.number)) {}

  void encode(const std::vector<BlockedGradient>& gradients, const at::Tensor& error, const at::Tensor& wire,
              double scale, Rounding rounding) override {
    auto* const bytes = wire.data_ptr<uint8_t>();
    auto* const errors = error_of(error);
    for_blocks(gradients, [&](const BlockRun& run, int64_t block, const float* gradient) {
      float y[kMostInBlock], lost[kMostInBlock];
      auto* const own = errors == nullptr ? nullptr : errors + block * format_.block;
      const auto most = loops_.add_error(gradient, own, static_cast<float>(scale), y, format_.block);
      const auto first = static_cast<uint32_t>(block * format_.block);
      const auto of_block = loops_.encode(y, most, own == nullptr ? lost : own, numbers(bytes, block), format_.block,
                                          /*adds=*/false, rounding, first);
      std::memcpy(scale_at(bytes, block), &of_block, sizeof(float));
    });
  }

  void add(const std::vector<at::Tensor>& shards, const at::Tensor& target, const at::Tensor& error, Rounding rounding,
           int64_t first_element) override {
    std::vector<const uint8_t*> sources;
    for (const auto& shard : shards) sources.push_back(shard.const_data_ptr<uint8_t>());
    auto* const bytes = target.data_ptr<uint8_t>();
    auto* const errors = error_of(error);
    const auto blocks = target.numel() / format_.group_bytes() * Block8::kBlocks;
    at::parallel_for(0, blocks, kGrainRuns * kRunBlocks, [&](int64_t begin, int64_t end) {
      for (auto block = begin; block < end; ++block) {
        float sums[kMostInBlock] = {}, lost[kMostInBlock];
        int32_t most = 0;
        for (const auto* source : sources) {
          most = loops_.add(numbers(source, block), scale_of(source, block), sums, format_.block);
        }
        auto* const own = errors == nullptr ? nullptr : errors + block * format_.block;
        const auto first = static_cast<uint32_t>(first_element + block * format_.block);
        const auto of_block = loops_.encode(sums, most, own == nullptr ? lost : own, numbers(bytes, block),
                                            format_.block, /*adds=*/own != nullptr, rounding, first);
        std::memcpy(scale_at(bytes, block), &of_block, sizeof(float));
      }
    });
  }

  at::Tensor decode(const std::vector<BlockedGradient>& gradients, const at::Tensor& wire) override {
    const auto* const bytes = wire.const_data_ptr<uint8_t>();
    SumInOrder measured;
    for_runs(gradients, [&](const BlockRun& run) {
      for_gradient_dtype(*run.gradient, [&](auto number) {
        using T = decltype(number);
        auto* const values = run.gradient->data_ptr<T>() + run.begin;
        decode_run(run, bytes, values);
        measured.add(values, measure_block(values, run.count));
      });
    });
    return as_tensor(measured.total());
  }

  void give_back(const std::vector<BlockedGradient>& gradients, const at::Tensor& error, const at::Tensor& wire,
                 double scale) override {
    const auto* const bytes = wire.const_data_ptr<uint8_t>();
    auto* const errors = error_of(error);
    for_blocks(gradients, [&](const BlockRun& run, int64_t block, const float* gradient) {
      const auto of_block = scale_of(bytes, block);
      auto* const own = errors + block * format_.block;
      if (std::isnan(of_block)) {
        std::fill_n(own, format_.block, 0.0f);
      } else {
        loops_.give_back(numbers(bytes, block), of_block, gradient, static_cast<float>(scale), own, format_.block);
      }
    });
  }

 private:
  // ------------------------------------------------------------------------------------------------- the wire

  template <typename Byte>
  Byte* numbers(Byte* wire, int64_t block) const {
    return group(wire, block) + Block8::kBlocks * sizeof(float) + block % Block8::kBlocks * format_.block;
  }

  template <typename Byte>
  Byte* scale_at(Byte* wire, int64_t block) const {
    return group(wire, block) + block % Block8::kBlocks * sizeof(float);
  }

  float scale_of(const uint8_t* wire, int64_t block) const {
    float scale;
    std::memcpy(&scale, scale_at(wire, block), sizeof(float));
    return scale;
  }

  template <typename Byte>
  Byte* group(Byte* wire, int64_t block) const {
    return wire + block / Block8::kBlocks * format_.group_bytes();
  }

  static float* error_of(const at::Tensor& error) { return error.defined() ? error.data_ptr<float>() : nullptr; }

  // --------------------------------------------------------------------------------------------------- loops

  template <typename Function>
  void for_runs(const std::vector<BlockedGradient>& gradients, const Function& function) const {
    std::vector<BlockRun> runs;
    const auto elements = kRunBlocks * format_.block;
    for (const auto& [gradient, first_block] : gradients) {
      for (int64_t begin = 0; begin < gradient.numel(); begin += elements) {
        const auto count = std::min(elements, gradient.numel() - begin);
        runs.push_back({&gradient, begin, count, first_block + begin / format_.block});
      }
    }
    const auto count = static_cast<int64_t>(runs.size());
    at::parallel_for(0, count, kGrainRuns, [&](int64_t begin, int64_t end) {
      for (auto i = begin; i < end; ++i) function(runs[static_cast<size_t>(i)]);
    });
  }

  // function(run, block, its gradient in fp32 with zeros behind its last element).
  template <typename Function>
  void for_blocks(const std::vector<BlockedGradient>& gradients, const Function& function) const {
    for_runs(gradients, [&](const BlockRun& run) {
      for_gradient_dtype(*run.gradient, [&](auto number) {
        using T = decltype(number);
        const auto* const values = run.gradient->const_data_ptr<T>() + run.begin;
        for (int64_t begin = 0; begin < run.count; begin += format_.block) {
          float copy[kMostInBlock];
          const auto count = std::min(format_.block, run.count - begin);
          const float* wide = copy;
          if constexpr (std::is_same_v<T, float>) {
            if (count == format_.block) wide = values + begin;
          }
          if (wide == copy) {
            convert_numbers(values + begin, copy, count);
            std::fill(copy + count, copy + format_.block, 0.0f);
          }
          function(run, run.block + begin / format_.block, wide);
        }
      });
    });
  }

  template <typename T>
  void decode_run(const BlockRun& run, const uint8_t* bytes, T* values) const {
    for (int64_t begin = 0; begin < run.count; begin += format_.block) {
      const auto block = run.block + begin / format_.block;
      const auto count = std::min(format_.block, run.count - begin);
      if constexpr (std::is_same_v<T, float>) {
        loops_.decode(numbers(bytes, block), scale_of(bytes, block), values + begin, count);
      } else {
        float wide[kMostInBlock];
        loops_.decode(numbers(bytes, block), scale_of(bytes, block), wide, count);
        convert_numbers(wide, values + begin, count);
      }
    }
  }

  const Block8 format_;
  const BlockLoops& loops_;
};

}  // namespace

std::unique_ptr<Block8Kernels> make_cpu_block8_kernels(Block8 format) {
  return std::make_unique<CpuBlock8Kernels>(format);
}

}  // namespace fastddp
