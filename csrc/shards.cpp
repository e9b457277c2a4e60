#include "shards.h"

#include <ATen/ops/empty_like.h>

#include "streams.h"
#include "sum_shards.h"

// torch 2.11 knows the collectives by these names only.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace fastddp {
namespace {

at::Tensor rows(const at::Tensor& piece, const c10d::ProcessGroup& group) {
  return piece.view({group.getSize(), -1});
}

void make_room(const at::Tensor& piece, Received& received) {
  if (!received.shards.defined()) received.shards = at::empty_like(piece);
}

// What travels are bytes: backends need not know the dtype.
class ShardsOverCollectives : public Shards {
 public:
  Works scatter(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const override {
    make_room(piece, received);
    auto output = received.shards.view(at::kByte), input = piece.view(at::kByte);
    std::vector<int64_t> equal;
    return {group.alltoall_base(output, input, equal, equal)};
  }

  void add_up(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const override {
    keep_for_current_stream(received.shards);
    const auto shards = rows(received.shards, group);
    sum_shards(shards, shards[0]);
  }

  Works gather(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const override {
    auto output = piece.view(at::kByte), input = rows(received.shards, group)[0].view(at::kByte);
    return {group._allgather_base(output, input)};
  }
};

// Note [Shards over gloo]
class ShardsOverPairs : public Shards {
 public:
  Works scatter(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const override {
    make_room(piece, received);
    const auto source = rows(piece, group), target = rows(received.shards, group);
    return exchange(
        group, [&](int rank) { return target[rank]; }, [&](int rank) { return source[rank]; }, 2 * received.tag);
  }

  // A rank's own shard is where it was packed.
  void add_up(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const override {
    const auto own = rows(piece, group)[group.getRank()];
    auto shards = rows(received.shards, group).unbind();
    shards[group.getRank()] = own;
    sum_shards(shards, own);
  }

  Works gather(c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const override {
    const auto all = rows(piece, group);
    const auto own = all[group.getRank()];
    return exchange(group, [&](int rank) { return all[rank]; }, [&](int) { return own; }, 2 * received.tag + 1);
  }

 private:
  template <typename Target, typename Source>
  static Works exchange(c10d::ProcessGroup& group, const Target& target, const Source& source, uint32_t tag) {
    // Far from the small numbers that users give messages of their own.
    constexpr uint32_t first_tag = 0x46440000;
    Works works;
    const auto others = [&](const auto& function) {
      // Each rank begins with the one behind it, or all would begin with the same.
      for (int step = 1; step < group.getSize(); ++step) function((group.getRank() + step) % group.getSize());
    };
    others([&](int rank) {
      std::vector<at::Tensor> tensors{target(rank).view(at::kByte)};
      works.push_back(group.recv(tensors, rank, static_cast<int>(first_tag + tag)));
    });
    others([&](int rank) {
      std::vector<at::Tensor> tensors{source(rank).view(at::kByte)};
      works.push_back(group.send(tensors, rank, static_cast<int>(first_tag + tag)));
    });
    return works;
  }
};

}  // namespace

std::unique_ptr<Shards> make_shards(const std::string& backend) {
  if (backend == "gloo") return std::make_unique<ShardsOverPairs>();
  return std::make_unique<ShardsOverCollectives>();
}

}  // namespace fastddp
