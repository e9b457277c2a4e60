#include <ATen/ops/empty.h>

#include <algorithm>

#include "transport/sum_shards.h"
#include "transport/transport.h"

// torch 2.11 knows the collectives by these names only.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace fastddp {
namespace {

at::Tensor rows(const at::Tensor& part, size_t count) {
  return part.view({static_cast<int64_t>(count), -1});
}

void make_room(Piece& piece, int64_t elements) {
  if (!piece.room.defined()) piece.room = at::empty({elements}, piece.wire.options());
}

// The first half of the rounds scatters shards to the ranks that add them up. The second half gathers the sums.
class ShardedSum : public Transport {
 public:
  using Transport::Transport;

  // While one piece is added up, others travel. On a device this works over one lane too, because another stream adds up.
  std::vector<at::Tensor> split(const at::Tensor& wire) const override {
    constexpr int64_t piece_bytes = 16 << 20, least_bytes_on_device = 8 << 20;
    if (has_streams(wire.device())) return Lanes::cut(wire, unit(), least_bytes_on_device);
    return lanes_.split(wire, unit(), piece_bytes);
  }

  int64_t unit() const override { return parts() * (adder_ != nullptr ? adder_->unit() : elements_together()); }

 protected:
  // The number of shards of a wire.
  virtual int64_t parts() const = 0;

  // The elements of a shard are a multiple of this.
  virtual int64_t elements_together() const { return 1; }

  // The place for the sum of a piece.
  const at::Tensor& sum_of(const Piece& piece) const { return adder_ != nullptr ? piece.room : piece.wire; }

  // target = the sum of `shards`; `own`: the shard of this rank's own wire.
  void add_shards(const Piece& piece, const std::vector<at::Tensor>& shards, const at::Tensor& own,
                  const at::Tensor& target) const {
    if (adder_ == nullptr) return sum_shards(shards, target);
    adder_->add(piece.message, own.storage_offset(), shards, target);  // a wire has its own storage
  }
};

// Sends bytes, so that backends need not know the dtype.
class OverCollectives : public ShardedSum {
 public:
  OverCollectives(Lanes lanes, c10::Device device) : ShardedSum(std::move(lanes)), device_(device) {}

  size_t rounds() const override { return 2; }

  bool takes_room() const override { return true; }

  void start(size_t round, c10d::ProcessGroup& lane, Piece& piece) const override {
    if (round == 0) {
      auto all = piece.wire.view(at::kByte);
      make_room(piece, piece.wire.numel());
      auto output = piece.room.view(at::kByte);
      std::vector<int64_t> equal;
      piece.works.push_back(lane.alltoall_base(output, all, equal, equal));
    } else {
      auto all = sum_of(piece).view(at::kByte);
      auto own = shards(sum_of(piece))[lane.getRank()].view(at::kByte);
      piece.works.push_back(lane._allgather_base(all, own));
    }
  }

  void add_up(size_t, c10d::ProcessGroup& lane, const Piece& piece) const override {
    const auto own = shards(piece.wire)[lane.getRank()], target = shards(sum_of(piece))[lane.getRank()];
    if (adder_ == nullptr) return sum_shards(shards(piece.room), target);
    add_shards(piece, shards(piece.room).unbind(), own, target);
  }

 private:
  int64_t parts() const override { return lanes_.ranks(); }

  // On a device a kernel reads 16 bytes at a time: 8 numbers of 16 bits.
  int64_t elements_together() const override { return has_streams(device_) ? 8 : 1; }

  at::Tensor shards(const at::Tensor& part) const { return rows(part, static_cast<size_t>(lanes_.ranks())); }

  const c10::Device device_;
};

// Note [Shards over gloo], note [Two levels]
class OverPairs : public ShardedSum {
 public:
  OverPairs(Lanes lanes, std::vector<Level> levels) : ShardedSum(std::move(lanes)), levels_(std::move(levels)) {}

  void set_adder(Adder* adder) override {
    TORCH_CHECK_VALUE(adder == nullptr || levels_.size() == 1, "fastddp: what is added up by a codec has one level.");
    ShardedSum::set_adder(adder);
  }

  size_t rounds() const override { return 2 * levels_.size(); }

  bool sends_collectives() const override { return false; }

  void start(size_t round, c10d::ProcessGroup& lane, Piece& piece) const override {
    const auto number = level_of(round);
    const auto part = part_of(piece.wire, number);
    if (!part.defined()) return;
    const auto& level = levels_[number];
    auto left_out = piece.sent;
    const Messages messages{lane, level, tag(round, piece), piece.works, left_out};
    if (round < levels_.size()) {
      if (level.owns_a_shard()) {
        make_room(piece, most_room(piece.wire));
        messages.receive(room_for(part, level, piece), level.ranks.size());
      }
      messages.send(rows(part, level.shards), level.shards);
    } else {
      const auto shards = rows(part_of(sum_of(piece), number), level.shards);
      messages.receive(shards, level.shards);
      if (level.owns_a_shard()) messages.send(repeated(shards[own(level)], level), level.ranks.size());
    }
  }

  // A rank's own shard is still in the wire.
  void add_up(size_t round, c10d::ProcessGroup&, const Piece& piece) const override {
    if (round >= levels_.size() || !levels_[round].owns_a_shard()) return;
    const auto& level = levels_[round];
    const auto part = part_of(piece.wire, round);
    auto shards = room_for(part, level, piece).unbind();
    const auto of_this_rank = rows(part, level.shards)[own(level)];
    shards[level.place] = of_this_rank;
    add_shards(piece, shards, of_this_rank, rows(part_of(sum_of(piece), round), level.shards)[own(level)]);
  }

 private:
  int64_t parts() const override {
    int64_t all = 1;
    for (const auto& level : levels_) all *= static_cast<int64_t>(level.shards);
    return all;
  }

  // The messages of one round, to or from the first `count` ranks of a level except this one. Tensors have a row for each rank.
  struct Messages {
    c10d::ProcessGroup& group;
    const Level& level;
    int tag;
    Works& works;
    size_t& left_out;  // how many messages to skip

    void receive(const at::Tensor& shards, size_t count) const {
      others(shards, count, [&](auto& shard, int rank) { return group.recv(shard, rank, tag); });
    }

    void send(const at::Tensor& shards, size_t count) const {
      others(shards, count, [&](auto& shard, int rank) { return group.send(shard, rank, tag); });
    }

   private:
    // Each rank begins with the next rank, so that not all begin with the same one.
    template <typename Function>
    void others(const at::Tensor& shards, size_t count, const Function& function) const {
      for (size_t step = 1; step < level.ranks.size(); ++step) {
        const auto place = (level.place + step) % level.ranks.size();
        if (place >= count) continue;
        if (left_out > 0) {
          --left_out;
          continue;
        }
        std::vector<at::Tensor> shard{shards[static_cast<int64_t>(place)].view(at::kByte)};
        works.push_back(function(shard, level.ranks[place]));
      }
    }
  };

  static at::Tensor repeated(const at::Tensor& shard, const Level& level) {
    return shard.expand({static_cast<int64_t>(level.ranks.size()), -1});
  }

  static int64_t own(const Level& level) { return static_cast<int64_t>(level.place); }

  // Scatters from the first level to the last, then gathers from the last to the first.
  size_t level_of(size_t round) const { return std::min(round, rounds() - 1 - round); }

  int tag(size_t round, const Piece& piece) const {
    // Far from the small tags of users' own messages.
    constexpr uint32_t first_tag = 0x46440000;
    // The most of any sharded sum, since several may travel over the same group.
    constexpr uint32_t most_rounds = 4;
    return static_cast<int>(first_tag + most_rounds * piece.tag + round);
  }

  // The part of a piece's wire that this rank handles in a level; undefined: nothing.
  at::Tensor part_of(const at::Tensor& wire, size_t number) const {
    auto part = wire;
    for (size_t i = 0; i < number; ++i) {
      if (!levels_[i].owns_a_shard()) return {};
      part = rows(part, levels_[i].shards)[own(levels_[i])];
    }
    return part;
  }

  static int64_t room_elements(int64_t part, const Level& level) {
    return part / static_cast<int64_t>(level.shards) * static_cast<int64_t>(level.ranks.size());
  }

  // Enough for every level: they use the room one after the other.
  int64_t most_room(const at::Tensor& wire) const {
    int64_t most = 0;
    for (size_t i = 0; i < levels_.size(); ++i) {
      most = std::max(most, room_elements(part_of(wire, i).numel(), levels_[i]));
    }
    return most;
  }

  static at::Tensor room_for(const at::Tensor& part, const Level& level, const Piece& piece) {
    return rows(piece.room.narrow(0, 0, room_elements(part.numel(), level)), level.ranks.size());
  }

  const std::vector<Level> levels_;
};

}  // namespace

std::unique_ptr<Transport> make_sharded_sum(Lanes lanes, const Nodes& nodes, c10::Device device) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(nodes.size()) == lanes.ranks(), "fastddp: the nodes of ", nodes.size(),
                    " ranks do not fit a process group of ", lanes.ranks());
  if (lanes.backend(device) != "gloo" || !device.is_cpu()) {
    return std::make_unique<OverCollectives>(std::move(lanes), device);
  }
  auto levels = make_levels(nodes, lanes.first()->getRank());
  return std::make_unique<OverPairs>(std::move(lanes), std::move(levels));
}

}  // namespace fastddp
