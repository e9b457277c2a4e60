// Block8 on the CPU: one pass each. A block stays in the L1 cache while one loop finds its largest number and another its bytes.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "block8/kernels.h"
#include "block8/loops.h"
#include "pack/measured.h"

namespace fastddp {
namespace {

constexpr int64_t kRunBlocks = 32;  // blocks that one thread does in a row
constexpr int64_t kGrainRuns = 4;   // a thread is worth waking for this many

const BlockLoops& loops_of(Block8::Number number, int64_t most_vector_bits) {
  switch (number) {
    case Block8::Number::e4m3:
      return loops_for<E4m3>(most_vector_bits);
    case Block8::Number::e5m2:
      return loops_for<E5m2>(most_vector_bits);
    case Block8::Number::int8:
      break;
  }
  return loops_for<Int8>(most_vector_bits);
}

// Adjacent blocks of one gradient.
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
      TORCH_CHECK_TYPE(false, "fastddp: 8 bits are made of gradients of fp32, fp16 or bf16, not of ", gradient.scalar_type());
  }
}

class CpuBlock8Kernels : public Block8Kernels {
 public:
  CpuBlock8Kernels(Block8 format, int64_t most_vector_bits)
      : format_(format), loops_(loops_of(format.number, most_vector_bits)) {}

  void encode(const std::vector<BlockedGradient>& gradients, const at::Tensor& before, const at::Tensor& error,
              const at::Tensor& wire, double scale, Rounding rounding) override {
    auto* const bytes = wire.data_ptr<uint8_t>();
    const auto* const errors_before = error_of(before);
    auto* const errors = error_of(error);
    for_blocks(gradients, [&](const BlockRun& run, int64_t block, const float* gradient) {
      float y[kMostInBlock], lost[kMostInBlock];
      auto* const own = errors == nullptr ? nullptr : errors + block * format_.block;
      const auto* const old = errors_before == nullptr ? nullptr : errors_before + block * format_.block;
      if (own != nullptr) fetch_soon_for_writing(own, format_.block);
      if (old != own) fetch_soon(reinterpret_cast<const uint8_t*>(old), format_.block * 4);
      const auto most = loops_.add_error(gradient, old, static_cast<float>(scale), y, format_.block);
      const auto first = static_cast<uint32_t>(block * format_.block);
      const auto of_block = loops_.encode(y, most, own == nullptr ? lost : own, places_.bytes(bytes, block), format_.block,
                                          /*adds=*/false, rounding, first);
      std::memcpy(places_.scale_at(bytes, block), &of_block, sizeof(float));
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
      std::vector<CodedBlock> coded(sources.size());
      for (auto block = begin; block < end; ++block) {
        if (errors != nullptr) fetch_soon_for_writing(errors + block * format_.block, format_.block);
        float sums[kMostInBlock], lost[kMostInBlock];
        for (size_t i = 0; i < sources.size(); ++i) coded[i] = places_.coded(sources[i], block);
        const auto most = loops_.add(coded, sums, format_.block);
        auto* const own = errors == nullptr ? nullptr : errors + block * format_.block;
        const auto first = static_cast<uint32_t>(first_element + block * format_.block);
        const auto of_block = loops_.encode(sums, most, own == nullptr ? lost : own, places_.bytes(bytes, block), format_.block,
                                            /*adds=*/own != nullptr, rounding, first);
        std::memcpy(places_.scale_at(bytes, block), &of_block, sizeof(float));
      }
    });
  }

  at::Tensor decode(const std::vector<BlockedGradient>& gradients, const at::Tensor& wire) override {
    const auto* const bytes = wire.const_data_ptr<uint8_t>();
    const auto runs = runs_of(gradients);
    std::vector<Measured> measured(runs.size());  // added up in order, so that the bits are always the same
    for_runs(runs, [&](const BlockRun& run) {
      for_gradient_dtype(*run.gradient, [&](auto number) {
        using T = decltype(number);
        auto* const destination = run.gradient->data_ptr<T>() + run.begin;
        const auto past_caches = static_cast<int64_t>(run.gradient->nbytes()) >= kStreamFromBytes;
        const auto decode = std::get<DecodeLoop<T>>(loops_.decode);
        const CodedBlocks blocks{places_, bytes, run.block};
        measured[static_cast<size_t>(&run - runs.data())] = decode(blocks, destination, run.count, past_caches);
      });
      end_of_copies();
    });
    Measured all;
    for (const auto& part : measured) all += part;
    return as_tensor(all);
  }

 private:
  static float* error_of(const at::Tensor& error) { return error.defined() ? error.data_ptr<float>() : nullptr; }

  std::vector<BlockRun> runs_of(const std::vector<BlockedGradient>& gradients) const {
    std::vector<BlockRun> runs;
    const auto elements = kRunBlocks * format_.block;
    for (const auto& [gradient, first_block] : gradients) {
      for (int64_t begin = 0; begin < gradient.numel(); begin += elements) {
        const auto count = std::min(elements, gradient.numel() - begin);
        runs.push_back({&gradient, begin, count, first_block + begin / format_.block});
      }
    }
    return runs;
  }

  template <typename Function>
  void for_runs(const std::vector<BlockRun>& runs, const Function& function) const {
    at::parallel_for(0, static_cast<int64_t>(runs.size()), kGrainRuns, [&](int64_t begin, int64_t end) {
      for (auto i = begin; i < end; ++i) function(runs[static_cast<size_t>(i)]);
    });
  }

  // function(run, block, the block's gradient in fp32, padded with zeros).
  template <typename Function>
  void for_blocks(const std::vector<BlockedGradient>& gradients, const Function& function) const {
    for_runs(runs_of(gradients), [&](const BlockRun& run) {
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

  const Block8 format_;
  const BlockPlaces places_{format_};
  const BlockLoops& loops_;
};

}  // namespace

std::unique_ptr<Block8Kernels> make_cpu_block8_kernels(Block8 format, int64_t most_vector_bits) {
  return std::make_unique<CpuBlock8Kernels>(format, most_vector_bits);
}

}  // namespace fastddp
