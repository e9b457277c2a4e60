#include <algorithm>

#include "transport/transport.h"

namespace fastddp {
namespace {

// One of the two stages: note [Runs of a wire].
class ShardStage : public Transport {
 public:
  ShardStage(Lanes lanes, c10::Device device, Cut cut, bool own_sums)
      : Transport(std::move(lanes)),
        in_pairs_(goes_in_pairs(*lanes_.first(), device)),
        own_sums_(own_sums),
        stages_(make_stages(lanes_, device, own_sums)),
        cut_(std::move(cut)) {}

  bool sends_collectives() const override { return false; }

  bool gives_the_sum_to_all() const override { return false; }

  std::vector<at::Tensor> split(const at::Tensor& wire) const override { return {wire}; }

 protected:
  const Shards& runs_of(Piece& piece) const {
    if (piece.shards.empty()) piece.shards = cut_(piece.wire, piece.bucket);
    return piece.shards;
  }

  at::Tensor own_run(const at::Tensor& wire, size_t bucket) const {
    return cut_(wire, bucket)[static_cast<size_t>(lanes_.first()->getRank())];
  }

  const bool in_pairs_;
  const bool own_sums_;
  const std::unique_ptr<Stages> stages_;

 private:
  const Cut cut_;
};

class ShardSum : public ShardStage {
 public:
  ShardSum(Lanes lanes, c10::Device device, Cut cut, SumOfRuns how)
      : ShardStage(std::move(lanes), device, std::move(cut), how.own_sums), how_(how) {}

  double scale_before(c10::ScalarType) const override { return how_.times * weighting_.scale(how_.ranks); }

  int64_t unit() const override { return adder_ == nullptr ? 1 : adder_->unit(); }

  bool takes_room() const override { return own_sums_ && !in_pairs_; }

  void start(size_t, c10d::ProcessGroup& lane, Piece& piece) const override {
    if (shares_room() && !piece.room.defined()) take_room(piece);
    stages_->start_sum(0, lane, piece, runs_of(piece), sum_of(piece));
  }

  void add_up(size_t, Piece& piece) const override {
    stages_->add_up(piece, piece.shards, sum_of(piece));
    if (shares_room() && piece.room.defined()) rooms_.push_back(std::move(piece.room));
  }

  void give_room_back() const override { rooms_.clear(); }

 private:
  // Messages that are not on their way at the same time use the same memory. On a device they may be, as far as the host knows.
  bool shares_room() const { return in_pairs_ && adder_ == nullptr && lanes_.ranks() > 1; }

  // The smallest one in which the message fits, if runs are equal parts; else it may still be too small.
  void take_room(Piece& piece) const {
    const auto fits = [&](const at::Tensor& room) {
      return room.scalar_type() == piece.wire.scalar_type() &&
             room.numel() + room.numel() / (lanes_.ranks() - 1) >= piece.wire.numel();
    };
    const auto size = [&](const at::Tensor& room) { return fits(room) ? room.nbytes() : SIZE_MAX; };
    const auto found = std::ranges::min_element(rooms_, {}, size);
    if (found == rooms_.end() || !fits(*found)) return;
    piece.room = std::move(*found);
    rooms_.erase(found);
  }

  Sum sum_of(const Piece& piece) const {
    return {own_run(adder_ == nullptr ? piece.wire : piece.sum, piece.bucket), adder_, how_.is_last};
  }

  mutable std::vector<at::Tensor> rooms_;
  const SumOfRuns how_;
};

// Over the same group, so its messages have tags of the next round.
class ShardSpread : public ShardStage {
 public:
  ShardSpread(Lanes lanes, c10::Device device, Cut cut)
      : ShardStage(std::move(lanes), device, std::move(cut), /*own_sums=*/false) {}

  void start(size_t, c10d::ProcessGroup& lane, Piece& piece) const override {
    stages_->start_spread(1, lane, piece, runs_of(piece));
  }
};

}  // namespace

std::unique_ptr<Transport> make_shard_sum(Lanes lanes, c10::Device device, Cut cut, SumOfRuns how) {
  return std::make_unique<ShardSum>(std::move(lanes), device, std::move(cut), how);
}

std::unique_ptr<Transport> make_shard_spread(Lanes lanes, c10::Device device, Cut cut) {
  return std::make_unique<ShardSpread>(std::move(lanes), device, std::move(cut));
}

}  // namespace fastddp
