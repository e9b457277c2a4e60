#include "shards.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "streams.h"
#include "sum_shards.h"

// torch 2.11 knows the collectives by these names only.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace fastddp {
namespace {

at::Tensor rows(const at::Tensor& part, size_t count) {
  return part.view({static_cast<int64_t>(count), -1});
}

void make_room(const at::Tensor& piece, int64_t elements, Received& received) {
  if (!received.room.defined()) received.room = at::empty({elements}, piece.options());
}

// What travels are bytes: backends need not know the dtype.
class ShardsOverCollectives : public Shards {
 public:
  explicit ShardsOverCollectives(size_t ranks) : ranks_(ranks) {}

  int64_t unit() const override {
    return static_cast<int64_t>(ranks_);
  }

  size_t rounds() const override {
    return 2;
  }

  void start(size_t round, c10d::ProcessGroup& group, const at::Tensor& piece, Received& received,
             Works& works) const override {
    auto all = piece.view(at::kByte);
    if (round == 0) {
      make_room(piece, piece.numel(), received);
      auto output = received.room.view(at::kByte);
      std::vector<int64_t> equal;
      works.push_back(group.alltoall_base(output, all, equal, equal));
    } else {
      auto own = rows(piece, ranks_)[group.getRank()].view(at::kByte);
      works.push_back(group._allgather_base(all, own));
    }
  }

  void add_up(size_t round, c10d::ProcessGroup& group, const at::Tensor& piece, Received& received) const override {
    if (round != 0) return;
    keep_for_current_stream(received.room);
    sum_shards(rows(received.room, ranks_), rows(piece, ranks_)[group.getRank()]);
  }

 private:
  const size_t ranks_;
};

// Note [Shards over gloo], note [Two levels]
class ShardsOverPairs : public Shards {
 public:
  explicit ShardsOverPairs(std::vector<Level> levels) : levels_(std::move(levels)) {}

  int64_t unit() const override {
    int64_t all = 1;
    for (const auto& level : levels_) all *= static_cast<int64_t>(level.shards);
    return all;
  }

  size_t rounds() const override {
    return 2 * levels_.size();
  }

  void start(size_t round, c10d::ProcessGroup& group, const at::Tensor& piece, Received& received,
             Works& works) const override {
    const auto number = level_of(round);
    const auto part = part_of(piece, number);
    if (!part.defined()) return;
    const auto& level = levels_[number];
    const auto shards = rows(part, level.shards);
    auto left_out = received.started;
    const Messages messages{group, level, tag(round, received), works, left_out};
    if (round < levels_.size()) {
      if (level.owns_a_shard()) {
        make_room(piece, most_room(piece), received);
        messages.receive(room_for(part, level, received), level.ranks.size());
      }
      messages.send(shards, level.shards);
    } else {
      messages.receive(shards, level.shards);
      if (level.owns_a_shard()) messages.send(repeated(shards[own(level)], level), level.ranks.size());
    }
  }

  // A rank's own shard is where it was packed.
  void add_up(size_t round, c10d::ProcessGroup&, const at::Tensor& piece, Received& received) const override {
    if (round >= levels_.size() || !levels_[round].owns_a_shard()) return;
    const auto& level = levels_[round];
    const auto part = part_of(piece, round);
    auto shards = room_for(part, level, received).unbind();
    const auto sum = rows(part, level.shards)[own(level)];
    shards[level.place] = sum;
    sum_shards(shards, sum);
  }

 private:
  // The messages of one round, from and to the first `count` ranks of a level but this one: a row for each.
  struct Messages {
    c10d::ProcessGroup& group;
    const Level& level;
    int tag;
    Works& works;
    size_t& left_out;  // how many are to be

    void receive(const at::Tensor& shards, size_t count) const {
      others(shards, count, [&](auto& shard, int rank) { return group.recv(shard, rank, tag); });
    }

    void send(const at::Tensor& shards, size_t count) const {
      others(shards, count, [&](auto& shard, int rank) { return group.send(shard, rank, tag); });
    }

   private:
    // Each rank begins with the one behind it, or all would begin with the same.
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

  static int64_t own(const Level& level) {
    return static_cast<int64_t>(level.place);
  }

  // What was scattered from the first level to the last is gathered from the last to the first.
  size_t level_of(size_t round) const {
    return std::min(round, rounds() - 1 - round);
  }

  int tag(size_t round, const Received& received) const {
    // Far from the small numbers that users give messages of their own.
    constexpr uint32_t first_tag = 0x46440000;
    return static_cast<int>(first_tag + rounds() * received.tag + round);
  }

  // What of the piece this rank deals with in a level; undefined: nothing.
  at::Tensor part_of(const at::Tensor& piece, size_t number) const {
    auto part = piece;
    for (size_t i = 0; i < number; ++i) {
      if (!levels_[i].owns_a_shard()) return {};
      part = rows(part, levels_[i].shards)[own(levels_[i])];
    }
    return part;
  }

  static int64_t room_elements(int64_t part, const Level& level) {
    return part / static_cast<int64_t>(level.shards) * static_cast<int64_t>(level.ranks.size());
  }

  // The levels use it one after the other.
  int64_t most_room(const at::Tensor& piece) const {
    int64_t most = 0;
    for (size_t i = 0; i < levels_.size(); ++i) {
      most = std::max(most, room_elements(part_of(piece, i).numel(), levels_[i]));
    }
    return most;
  }

  static at::Tensor room_for(const at::Tensor& part, const Level& level, const Received& received) {
    return rows(received.room.narrow(0, 0, room_elements(part.numel(), level)), level.ranks.size());
  }

  const std::vector<Level> levels_;
};

}  // namespace

std::unique_ptr<Shards> make_shards(const std::string& backend, c10::Device device, const Nodes& nodes, int rank) {
  if (backend == "gloo" && device.is_cpu()) return std::make_unique<ShardsOverPairs>(make_levels(nodes, rank));
  return std::make_unique<ShardsOverCollectives>(nodes.size());
}

}  // namespace fastddp
