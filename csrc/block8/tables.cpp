#include "block8/tables.h"

#include <algorithm>

namespace fastddp {

Words gradient_words(const std::vector<BlockedGradient>& gradients) {
  Words words;
  for (const auto& of : gradients) words.push_back(reinterpret_cast<int64_t>(of.gradient.const_data_ptr()));
  return words;
}

Words shard_words(const std::vector<at::Tensor>& shards) {
  Words words;
  for (const auto& shard : shards) words.push_back(reinterpret_cast<int64_t>(shard.const_data_ptr()));
  return words;
}

Words place_words(const std::vector<BlockedGradient>& gradients) {
  Words words;
  for (const auto& of : gradients) words.insert(words.end(), {of.gradient.numel(), of.first_block});
  return words;
}

Words run_words(const std::vector<BlockedGradient>& gradients, Block8 format, int64_t elements) {
  Words words;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto numel = gradients[i].gradient.numel();
    for (int64_t begin = 0; begin < numel; begin += elements) {
      words.insert(words.end(), {static_cast<int64_t>(i), begin, gradients[i].first_block + begin / format.block,
                                 std::min(elements, numel - begin)});
    }
  }
  return words;
}

}  // namespace fastddp
