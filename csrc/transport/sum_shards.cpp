#include "transport/sum_shards.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <string>

#include "device/launcher.h"
#include "device/vector_x86.h"

namespace fastddp {
namespace {

constexpr int64_t kBlock = 4096;  // elements whose sums stay in cache

template <typename Half>
void add_block(const Half* values, float* sums, int64_t count) {
  for (int64_t i = vector_add(values, sums, count); i < count; ++i) sums[i] += static_cast<float>(values[i]);
}

template <typename Half>
void sum_on_cpu(const std::vector<at::Tensor>& shards, const at::Tensor& target) {
  const auto elements = target.numel();
  std::vector<const Half*> sources;
  for (const auto& shard : shards) sources.push_back(shard.const_data_ptr<Half>());
  auto* sum = target.data_ptr<Half>();
  at::parallel_for(0, (elements + kBlock - 1) / kBlock, 8, [&](int64_t begin, int64_t end) {
    float sums[kBlock];
    for (auto block = begin; block < end; ++block) {
      const auto first = block * kBlock;
      const auto count = std::min(kBlock, elements - first);
      std::fill_n(sums, count, 0.0f);
      for (const auto* source : sources) add_block(source + first, sums, count);
      auto* rounded = sum + first;
      for (int64_t i = vector_convert(sums, rounded, count, 1.0f, false); i < count; ++i) {
        rounded[i] = static_cast<Half>(sums[i]);
      }
    }
  });
}

// Null: there is none for this purpose, or a tensor is not contiguous.
const LoadedKernel* kernel_for(const at::Tensor& shards, const at::Tensor& target, Purpose purpose) {
  if (!shards.is_contiguous() || !target.is_contiguous()) return nullptr;
  return find_kernel(target.device(), std::string("fastddp_sum_shards_") + triton_name(target.scalar_type()), purpose);
}

}  // namespace

void sum_shards(const std::vector<at::Tensor>& shards, const at::Tensor& target) {
  if (target.scalar_type() == at::kHalf) {
    sum_on_cpu<c10::Half>(shards, target);
  } else {
    sum_on_cpu<c10::BFloat16>(shards, target);
  }
}

void sum_shards_with_operators(const at::Tensor& shards, const at::Tensor& target) {
  const auto sum = at::zeros(target.sizes(), target.options().dtype(at::kFloat));
  for (const auto& shard : shards.unbind()) sum.add_(shard);
  target.copy_(sum);
}

void sum_shards(const at::Tensor& shards, const at::Tensor& target, Purpose purpose) {
  if (target.is_cpu()) return sum_shards(shards.unbind(), target);
  const auto* kernel = kernel_for(shards, target, purpose);
  const bool is_done = launched({kernel}, [&] {
    const auto programs = (target.numel() + kernel->tile.at(0) - 1) / kernel->tile.at(0);
    Launcher(target.device()).run(*kernel, programs, shards, shards.size(0), target.numel(), target);
  });
  if (!is_done) sum_shards_with_operators(shards, target);
}

}  // namespace fastddp
