// sum_shards: kernels/sum_shards_kernels.py, in plain loops.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "twin.h"

namespace fake_cuda {
namespace {

constexpr int64_t kAddedAtOnce = 4096;  // elements of one program

enum SumArgument : size_t { kShards, kRanks, kElements, kTarget };

template <typename Half>
void add_up(const Launch& launch, int64_t program) {
  const auto elements = launch.integer(kElements);
  const auto first = program * kAddedAtOnce, count = std::min(kAddedAtOnce, elements - first);
  std::vector<const Half*> rows;
  for (int64_t rank = 0; rank < launch.integer(kRanks); ++rank) {
    rows.push_back(launch.checked(launch.pointer<const Half>(kShards) + rank * elements + first, count));
  }
  auto* target = launch.checked(launch.pointer<Half>(kTarget) + first, count);
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (const auto* row : rows) sum += static_cast<float>(row[i]);
    target[i] = static_cast<Half>(sum);
  }
}

}  // namespace

std::optional<Twin> sums_twin(const std::string& kernel) {
  const bool is_fp16 = kernel == "fastddp_sum_shards_fp16";
  if (!is_fp16 && kernel != "fastddp_sum_shards_bf16") return std::nullopt;
  const auto memory = [](const Launch& launch) {
    return std::vector<Named>{{"the shards", launch.pointer<void>(kShards), 1},
                              {"the target", launch.pointer<void>(kTarget), 1}};
  };
  return Twin{4, memory, is_fp16 ? add_up<c10::Half> : add_up<c10::BFloat16>};
}

}  // namespace fake_cuda
