#include "transport/transport.h"

namespace fastddp {
namespace {

std::unique_ptr<Stages> make_stages(c10d::ProcessGroup& node, c10::Device device) {
  const auto level = all_ranks(static_cast<size_t>(node.getSize()), node.getRank());
  return goes_in_pairs(node, device) ? make_pairs(level) : make_collectives(level);
}

// One of the two stages: note [Inside a node].
class NodeStage : public Transport {
 public:
  NodeStage(Lanes node, c10::Device device, Cut cut)
      : Transport(std::move(node)), stages_(make_stages(*lanes_.first(), device)), cut_(std::move(cut)) {}

  bool sends_collectives() const override { return false; }

  std::vector<at::Tensor> split(const at::Tensor& wire) const override { return {wire}; }

 protected:
  const Shards& runs_of(Piece& piece) const {
    if (piece.shards.empty()) piece.shards = cut_(piece.wire, piece.bucket);
    return piece.shards;
  }

  const std::unique_ptr<Stages> stages_;

 private:
  const Cut cut_;
};

class NodeSum : public NodeStage {
 public:
  NodeSum(Lanes node, c10::Device device, Cut cut, int64_t ranks, double times)
      : NodeStage(std::move(node), device, std::move(cut)), ranks_(ranks), times_(times) {}

  double scale_before(c10::ScalarType) const override { return times_ * weighting_.scale(ranks_); }

  void start(size_t, c10d::ProcessGroup& lane, Piece& piece) const override {
    stages_->start_sum(0, lane, piece, runs_of(piece));
  }

  void add_up(size_t, const Piece& piece) const override {
    stages_->add_up(piece, piece.shards, piece.shards[static_cast<size_t>(lanes_.first()->getRank())], nullptr);
  }

 private:
  const int64_t ranks_;
  const double times_;
};

// Over the same group, so its messages have tags of the next round.
class NodeSpread : public NodeStage {
 public:
  using NodeStage::NodeStage;

  void start(size_t, c10d::ProcessGroup& lane, Piece& piece) const override {
    stages_->start_spread(1, lane, piece, runs_of(piece));
  }
};

}  // namespace

std::unique_ptr<Transport> make_node_sum(Lanes node, c10::Device device, Cut cut, int64_t ranks, double times) {
  return std::make_unique<NodeSum>(std::move(node), device, std::move(cut), ranks, times);
}

std::unique_ptr<Transport> make_node_spread(Lanes node, c10::Device device, Cut cut) {
  return std::make_unique<NodeSpread>(std::move(node), device, std::move(cut));
}

}  // namespace fastddp
