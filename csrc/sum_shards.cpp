#include "sum_shards.h"

#include <ATen/Parallel.h>
#include <ATen/ops/sum.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "vector_x86.h"

namespace fastddp {
namespace {

constexpr int64_t kBlock = 4096;  // elements whose sums stay in cache

template <typename Half>
void add_block(const Half* values, float* sums, int64_t count) {
  for (int64_t i = vector_add(values, sums, count); i < count; ++i) sums[i] += static_cast<float>(values[i]);
}

template <typename Half>
void sum_on_cpu(const at::Tensor& shards, const at::Tensor& copies) {
  const auto ranks = shards.size(0), elements = shards.size(1);
  const auto* source = shards.const_data_ptr<Half>();
  auto* target = copies.data_ptr<Half>();
  at::parallel_for(0, (elements + kBlock - 1) / kBlock, 8, [&](int64_t begin, int64_t end) {
    float sums[kBlock];
    for (auto block = begin; block < end; ++block) {
      const auto first = block * kBlock;
      const auto count = std::min(kBlock, elements - first);
      std::fill_n(sums, count, 0.0f);
      for (int64_t rank = 0; rank < ranks; ++rank) add_block(source + rank * elements + first, sums, count);
      auto* rounded = target + first;
      for (int64_t i = vector_convert(sums, rounded, count, 1.0f, false); i < count; ++i) {
        rounded[i] = static_cast<Half>(sums[i]);
      }
      for (int64_t copy = 1; copy < copies.size(0); ++copy) {
        std::memcpy(target + copy * elements + first, rounded, count * sizeof(Half));
      }
    }
  });
}

}  // namespace

void sum_shards(const at::Tensor& shards, const at::Tensor& copies) {
  if (!shards.is_cpu()) {
    const auto sum = shards.sum(0, /*keepdim=*/true, at::kFloat);  // half precision is added up in fp32, rounded below
    copies.copy_(sum.expand_as(copies));
  } else if (shards.scalar_type() == at::kHalf) {
    sum_on_cpu<c10::Half>(shards, copies);
  } else {
    sum_on_cpu<c10::BFloat16>(shards, copies);
  }
}

}  // namespace fastddp
