#include "transport/inside_node.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "transport/sum_shards.h"

// torch 2.11 knows the collectives by these names only.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace fastddp {
namespace {

// Whether the runs are equal parts of the whole wire, in the order of ranks.
bool are_equal_parts(const at::Tensor& wire, const InsideNode::Runs& runs) {
  auto begin = wire.storage_offset();
  for (const auto& run : runs) {
    if (run.numel() != runs.front().numel() || run.storage_offset() != begin) return false;
    begin += run.numel();
  }
  return begin == wire.storage_offset() + wire.numel();
}

// One collective if the runs are equal parts of the wire, else one for each run.
class NodeCollectives : public InsideNode {
 public:
  using InsideNode::InsideNode;

  void start_sum(Piece& piece, const Runs& runs) const override {
    if (are_equal_parts(piece.wire, runs)) {
      if (piece.sent > 0) return;
      auto own = runs[rank()], all = piece.wire;
      piece.works.push_back(group_->_reduce_scatter_base(own, all));
      return;
    }
    for_each_run(piece, runs, [&](std::vector<at::Tensor>& run, int owner) {
      c10d::ReduceOptions options;
      options.rootRank = owner;
      return group_->reduce(run, options);
    });
  }

  void start_spread(Piece& piece, const Runs& runs) const override {
    if (are_equal_parts(piece.wire, runs)) {
      if (piece.sent > 0) return;
      auto own = runs[rank()], all = piece.wire;
      piece.works.push_back(group_->_allgather_base(all, own));
      return;
    }
    for_each_run(piece, runs, [&](std::vector<at::Tensor>& run, int owner) {
      c10d::BroadcastOptions options;
      options.rootRank = owner;
      return group_->broadcast(run, options);
    });
  }

 private:
  template <typename Start>
  void for_each_run(Piece& piece, const Runs& runs, const Start& start) const {
    auto left_out = piece.sent;
    for (size_t owner = 0; owner < runs.size(); ++owner) {
      if (runs[owner].numel() == 0) continue;
      if (left_out > 0) {
        --left_out;
        continue;
      }
      std::vector<at::Tensor> run{runs[owner]};
      piece.works.push_back(start(run, static_cast<int>(owner)));
    }
  }
};

class NodePairs : public InsideNode {
 public:
  using InsideNode::InsideNode;

  void start_sum(Piece& piece, const Runs& runs) const override {
    const auto& own = runs[rank()];
    const auto others = static_cast<int64_t>(runs.size()) - 1;
    if (!piece.room.defined()) piece.room = at::empty({others * own.numel()}, own.options());
    auto left_out = piece.sent;
    for_others(runs,
               [&](size_t other) { message(piece, left_out, /*receives=*/true, 0, room(piece, own, other), other); });
    for_others(runs, [&](size_t other) { message(piece, left_out, /*receives=*/false, 0, runs[other], other); });
  }

  void add_up(const Piece& piece, const Runs& runs) const override {
    auto own = runs[rank()];
    if (own.numel() == 0) return;
    std::vector<at::Tensor> shards{own};
    for_others(runs, [&](size_t other) { shards.push_back(room(piece, own, other)); });
    if (c10::elementSize(own.scalar_type()) == 2) return sum_shards(shards, own);
    for (size_t i = 1; i < shards.size(); ++i) own.add_(shards[i]);
  }

  void start_spread(Piece& piece, const Runs& runs) const override {
    auto left_out = piece.sent;
    for_others(runs, [&](size_t other) { message(piece, left_out, /*receives=*/true, 1, runs[other], other); });
    for_others(runs, [&](size_t other) { message(piece, left_out, /*receives=*/false, 1, runs[rank()], other); });
  }

 private:
  // Each rank begins with the next rank, so that not all begin with the same one.
  template <typename Function>
  void for_others(const Runs& runs, const Function& function) const {
    for (size_t step = 1; step < runs.size(); ++step) function((rank() + step) % runs.size());
  }

  // The room for another rank's values of this rank's run.
  at::Tensor room(const Piece& piece, const at::Tensor& own, size_t other) const {
    const auto place = static_cast<int64_t>(other < rank() ? other : other - 1);
    return piece.room.narrow(0, place * own.numel(), own.numel());
  }

  void message(Piece& piece, size_t& left_out, bool receives, int round, const at::Tensor& part, size_t other) const {
    if (part.numel() == 0) return;
    if (left_out > 0) {
      --left_out;
      return;
    }
    // Far from the small tags of users' own messages, and from the tags of sharded sums.
    constexpr uint32_t first_tag = 0x46450000;
    const auto tag = static_cast<int>(first_tag + 2 * piece.tag + static_cast<uint32_t>(round));
    const auto rank_of_other = static_cast<int>(other);
    std::vector<at::Tensor> bytes{part.view(at::kByte)};
    piece.works.push_back(receives ? group_->recv(bytes, rank_of_other, tag) : group_->send(bytes, rank_of_other, tag));
  }
};

}  // namespace

std::unique_ptr<InsideNode> make_inside_node(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device) {
  const bool is_gloo = group->getBackend(device.type())->getBackendName() == "gloo";
  if (is_gloo && device.is_cpu()) return std::make_unique<NodePairs>(std::move(group));
  return std::make_unique<NodeCollectives>(std::move(group));
}

}  // namespace fastddp
