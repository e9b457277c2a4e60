#include "transport/pairs.h"

#include <ATen/ops/add.h>

#include "transport/sum_shards.h"

namespace fastddp {

int Messages::tag(size_t round, const Piece& piece) {
  // Far from the small numbers that users give messages of their own.
  constexpr uint32_t first_tag = 0x46440000;
  return static_cast<int>(first_tag + kMostRounds * piece.tag + static_cast<uint32_t>(round));
}

void sum_parts(const Level& level, size_t bucket, const std::vector<at::Tensor>& parts, const at::Tensor& target,
               const Adder* adder) {
  const auto& own = parts[level.place];
  if (adder != nullptr) return adder->add(bucket, own.storage_offset(), parts, target);  // a wire has its own storage
  if (c10::elementSize(target.scalar_type()) == 2) return sum_shards(parts, target);
  // In the order of ranks, whoever adds up. What others have sent is of no further use.
  auto sum = parts.front();
  for (size_t next = 1; next < parts.size(); ++next) {
    auto to = level.place == 0 || next + 1 == parts.size() ? target : parts.front();
    sum = at::add_out(to, sum, parts[next]);
  }
  if (parts.size() == 1) target.copy_(sum);
}

}  // namespace fastddp
