#include "transport/collectives.h"

#include <algorithm>

namespace fastddp {
namespace {

class AllReduce : public Collective {
 public:
  using Collective::Collective;

  void start(c10d::ProcessGroup& lane, Piece& piece) const override {
    c10d::AllreduceOptions options;
    options.reduceOp = piece.averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    std::vector<at::Tensor> tensors{piece.wire};
    piece.works.push_back(lane.allreduce(tensors, options));
  }
};

// In memory of its own, if the codec keeps what was sent.
const at::Tensor& sum_of(const Piece& piece) {
  return piece.sum.defined() ? piece.sum : piece.wire;
}

class ToOwners : public Collective {
 public:
  ToOwners(Lanes lanes, Halves halves, size_t round, bool is_last, bool shares_room)
      : Collective(std::move(lanes), halves.owners->takes_room()),
        halves_(std::move(halves)),
        round_(round),
        is_last_(is_last),
        shares_room_(shares_room) {}

  void start(c10d::ProcessGroup& lane, Piece& piece) const override {
    if (shares_room_ && !piece.room.defined()) take_room(piece);
    piece.shards = halves_.cut(piece.wire, piece.bucket);
    if (!piece.shards.empty()) halves_.owners->start_sum(round_, lane, piece, piece.shards, sum(piece));
  }

  void add_up(Piece& piece) const override {
    if (piece.shards.empty() || !halves_.owners->owns_a_shard()) return;
    halves_.owners->add_up(piece, piece.shards, sum(piece));
    if (shares_room_ && piece.room.defined()) rooms_.push_back(std::move(piece.room));
  }

  void give_room_back() const override { rooms_.clear(); }

 private:
  Sum sum(const Piece& piece) const {
    const auto& owners = *halves_.owners;
    const auto target = owners.owns_a_shard() ? halves_.cut(sum_of(piece), piece.bucket)[owners.place()] : at::Tensor();
    return {target, halves_.adder, halves_.unit, is_last_};
  }

  // The smallest one in which the message fits, if runs are equal parts; else it may still be too small.
  void take_room(Piece& piece) const {
    const auto fits = [&](const at::Tensor& room) {
      return room.scalar_type() == piece.wire.scalar_type() &&
             room.numel() + room.numel() / (lanes.ranks() - 1) >= piece.wire.numel();
    };
    const auto size = [&](const at::Tensor& room) { return fits(room) ? room.nbytes() : SIZE_MAX; };
    const auto found = std::ranges::min_element(rooms_, {}, size);
    if (found == rooms_.end() || !fits(*found)) return;
    piece.room = std::move(*found);
    rooms_.erase(found);
  }

  const Halves halves_;
  const size_t round_;
  const bool is_last_;
  const bool shares_room_;
  mutable std::vector<at::Tensor> rooms_;
};

class FromOwners : public Collective {
 public:
  FromOwners(Lanes lanes, Halves halves, size_t round)
      : Collective(std::move(lanes)), halves_(std::move(halves)), round_(round) {}

  void start(c10d::ProcessGroup& lane, Piece& piece) const override {
    piece.shards = halves_.cut(sum_of(piece), piece.bucket);
    if (!piece.shards.empty()) halves_.owners->start_spread(round_, lane, piece, piece.shards);
  }

 private:
  const Halves halves_;
  const size_t round_;
};

std::vector<at::Tensor> rows(const at::Tensor& part, size_t count) {
  return part.view({static_cast<int64_t>(count), -1}).unbind();
}

}  // namespace

std::shared_ptr<const Collective> make_all_reduce(Lanes lanes) {
  return std::make_shared<AllReduce>(std::move(lanes));
}

std::shared_ptr<const Collective> make_to_owners(Lanes lanes, Halves halves, size_t round, bool is_last, bool shares_room) {
  return std::make_shared<ToOwners>(std::move(lanes), std::move(halves), round, is_last, shares_room);
}

std::shared_ptr<const Collective> make_from_owners(Lanes lanes, Halves halves, size_t round) {
  return std::make_shared<FromOwners>(std::move(lanes), std::move(halves), round);
}

// What was sent from the first level to the last comes back from the last to the first.
Cut shards_of(std::vector<Level> levels, size_t level) {
  return [levels = std::move(levels), level](const at::Tensor& wire, size_t) -> Shards {
    auto part = wire;
    for (size_t i = 0; i < level; ++i) {
      if (!levels[i].owns_a_shard()) return {};
      part = rows(part, levels[i].shards)[levels[i].place];
    }
    return rows(part, levels[level].shards);
  };
}

}  // namespace fastddp
