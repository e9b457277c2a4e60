#include <algorithm>

#include "transport/transport.h"

namespace fastddp {
namespace {

std::vector<at::Tensor> rows(const at::Tensor& part, size_t count) {
  return part.view({static_cast<int64_t>(count), -1}).unbind();
}

// First the rounds that send shards to the ranks that add them up, from the inner level to the outer one; then as many that
// send the sums back. One level, or two: note [Two levels], levels.h.
class ShardedSum : public Transport {
 public:
  ShardedSum(Lanes lanes, const std::vector<Level>& levels, c10::Device device)
      : Transport(std::move(lanes)), levels_(levels), device_(device), in_pairs_(goes_in_pairs(*lanes_.first(), device)) {
    for (const auto& level : levels) stages_.push_back(in_pairs_ ? make_pairs(level, lanes_) : make_all_to_all(level));
  }

  void set_adder(Adder* adder) override {
    TORCH_CHECK_VALUE(adder == nullptr || levels_.size() == 1, "fastddp: what is added up by a codec has one level.");
    Transport::set_adder(adder);
  }

  std::unique_ptr<Transport> only_sum(c10::Device device, Cut cut) const override {
    return make_shard_sum(lanes_, device, std::move(cut),
                          {.own_sums = true, .ranks = lanes_.ranks(), .times = 1.0, .is_last = true});
  }

  // While one piece is added up, others travel: on a device over one lane too, since there another stream adds up.
  std::vector<at::Tensor> split(const at::Tensor& wire) const override {
    constexpr int64_t piece_bytes = 16 << 20, least_bytes_on_device = 8 << 20;
    if (has_streams(wire.device())) return Lanes::cut(wire, unit(), least_bytes_on_device);
    return lanes_.split(wire, unit(), piece_bytes);
  }

  int64_t unit() const override {
    auto unit = adder_ != nullptr ? adder_->unit() : elements_together();
    for (const auto& level : levels_) unit *= static_cast<int64_t>(level.shards);
    return unit;
  }

  size_t rounds() const override { return 2 * levels_.size(); }

  bool takes_room() const override { return !in_pairs_; }

  bool sends_collectives() const override { return !in_pairs_; }

  void start(size_t round, c10d::ProcessGroup& lane, Piece& piece) const override {
    const auto level = level_of(round);
    if (round < levels_.size()) {
      if (const auto part = part_of(piece.wire, level); part.defined()) {
        stages_[level]->start_sum(round, lane, piece, rows(part, levels_[level].shards), sum(level, piece));
      }
    } else if (const auto part = part_of(sum_of(piece), level); part.defined()) {
      stages_[level]->start_spread(round, lane, piece, rows(part, levels_[level].shards));
    }
  }

  void add_up(size_t round, Piece& piece) const override {
    if (round >= levels_.size() || !levels_[round].owns_a_shard()) return;
    stages_[round]->add_up(piece, rows(part_of(piece.wire, round), levels_[round].shards), sum(round, piece));
  }

 private:
  // On a device 16 bytes of 16-bit numbers, which its kernel reads at a time.
  int64_t elements_together() const { return has_streams(device_) ? 8 : 1; }

  // What was sent from the first level to the last comes back from the last to the first.
  size_t level_of(size_t round) const { return std::min(round, rounds() - 1 - round); }

  Sum sum(size_t level, const Piece& piece) const {
    if (!levels_[level].owns_a_shard()) return {{}, adder_, false};
    const auto target = rows(part_of(sum_of(piece), level), levels_[level].shards)[levels_[level].place];
    return {target, adder_, /*is_last=*/false};
  }

  const at::Tensor& sum_of(const Piece& piece) const { return adder_ != nullptr ? piece.sum : piece.wire; }

  // What of a piece's wire this rank deals with in a level; undefined: nothing.
  at::Tensor part_of(const at::Tensor& wire, size_t level) const {
    auto part = wire;
    for (size_t i = 0; i < level; ++i) {
      if (!levels_[i].owns_a_shard()) return {};
      part = rows(part, levels_[i].shards)[levels_[i].place];
    }
    return part;
  }

  const std::vector<Level> levels_;
  const c10::Device device_;
  const bool in_pairs_;
  std::vector<std::unique_ptr<Stages>> stages_;  // by level
};

}  // namespace

std::unique_ptr<Transport> make_sharded_sum(Lanes lanes, const Nodes& nodes, c10::Device device) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(nodes.size()) == lanes.ranks(), "fastddp: the nodes of ", nodes.size(),
                    " ranks do not fit a process group of ", lanes.ranks());
  const auto rank = lanes.first()->getRank();
  const bool in_pairs = goes_in_pairs(*lanes.first(), device);
  auto levels = in_pairs ? make_levels(nodes, rank) : std::vector{all_ranks(nodes.size(), rank)};
  return std::make_unique<ShardedSum>(std::move(lanes), std::move(levels), device);
}

}  // namespace fastddp
