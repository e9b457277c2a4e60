// Messages between pairs of ranks, and the sum of what they bring.
#pragma once

#include <vector>

#include "transport/owners.h"

namespace fastddp {

// Those of one piece in one round, as Owners starts them. Their memory has to live until they are waited for.
class Messages {
 public:
  Messages(c10d::ProcessGroup& group, Piece& piece, size_t round)
      : group_(group), piece_(piece), tag_(tag(round, piece)), left_out_(piece.sent) {}

  void receive(const at::Tensor& part, int rank) {
    add(part, [&](auto& bytes) { return group_.recv(bytes, rank, tag_); });
  }

  void send(const at::Tensor& part, int rank) {
    add(part, [&](auto& bytes) { return group_.send(bytes, rank, tag_); });
  }

 private:
  static int tag(size_t round, const Piece& piece);

  template <typename Start>
  void add(const at::Tensor& part, const Start& start) {
    if (part.numel() == 0) return;
    if (left_out_ > 0) {
      --left_out_;
      return;
    }
    std::vector<at::Tensor> bytes{part.view(at::kByte)};
    piece_.works.push_back(start(bytes));
  }

  c10d::ProcessGroup& group_;
  Piece& piece_;
  const int tag_;
  size_t left_out_;  // how many are to be
};

// The first `count` ranks of the level but this one. Each rank begins with the next one, or all would begin with the same.
template <typename Function>
void for_others(const Level& level, size_t count, const Function& function) {
  for (size_t step = 1; step < level.ranks.size(); ++step) {
    const auto place = (level.place + step) % level.ranks.size();
    if (place < count) function(place);
  }
}

// target = the sum of `parts`, what each rank of the level has of this rank's shard, or of a part of the shard. `target` may be this
// rank's own. Those of other ranks may be written to.
void sum_parts(const Level& level, size_t bucket, const std::vector<at::Tensor>& parts, const at::Tensor& target,
               const Adder* adder);

}  // namespace fastddp
