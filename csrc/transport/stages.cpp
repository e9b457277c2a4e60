#include "transport/stages.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "transport/sum_shards.h"

// torch 2.11 knows the collectives by these names only.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace fastddp {
namespace {

// `parts[place]` may be `target`.
void add_parts(const std::vector<at::Tensor>& parts, size_t place, const at::Tensor& target) {
  if (c10::elementSize(target.scalar_type()) == 2) return sum_shards(parts, target);
  if (!target.is_same(parts[place])) target.copy_(parts[place]);
  for (size_t other = 0; other < parts.size(); ++other) {
    if (other != place) target.add_(parts[other]);
  }
}

// In the order of ranks.
bool are_equal_parts(const at::Tensor& wire, const Shards& shards) {
  auto begin = wire.storage_offset();
  for (const auto& shard : shards) {
    if (shard.numel() != shards.front().numel() || shard.storage_offset() != begin) return false;
    begin += shard.numel();
  }
  return begin == wire.storage_offset() + wire.numel();
}

// Memory for what `rows` ranks send of this rank's shard, and `more` elements. Levels use it one after the other. The memory of the
// sum serves, if this rank's row there is where its sum goes.
at::Tensor room_for(Piece& piece, const Shards& shards, const Level& level, size_t rows, int64_t more = 0) {
  const auto& own = shards[level.place];
  const auto elements = static_cast<int64_t>(rows) * own.numel() + more;
  if (piece.sum.defined() && are_equal_parts(piece.wire, shards)) {
    piece.room = piece.sum;
  } else if (!piece.room.defined() || piece.room.numel() < elements) {
    piece.room = at::empty({elements}, own.options());
  }
  return piece.room;
}

class Pairs : public Stages {
 public:
  using Stages::Stages;

  void start_sum(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const override {
    Messages messages{lane, piece, tag(round, piece), piece.sent};
    if (owns_a_shard()) {
      const auto rows = rows_of(piece, room_for(piece, shards, level_, level_.ranks.size() - 1), shards);
      for_others(level_.ranks.size(), [&](size_t other) { messages.receive(rows[other], level_.ranks[other]); });
    }
    for_others(shards.size(), [&](size_t owner) { messages.send(shards[owner], level_.ranks[owner]); });
  }

  void add_up(const Piece& piece, const Shards& shards, const at::Tensor& target, Adder* adder) const override {
    if (!owns_a_shard() || target.numel() == 0) return;
    const auto& own = shards[level_.place];
    const auto parts = rows_of(piece, piece.room, shards);
    if (adder == nullptr) return add_parts(parts, level_.place, target);
    adder->add(piece.bucket, own.storage_offset(), parts, target);  // a wire has a storage of its own
  }

  void start_spread(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const override {
    Messages messages{lane, piece, tag(round, piece), piece.sent};
    for_others(shards.size(), [&](size_t owner) { messages.receive(shards[owner], level_.ranks[owner]); });
    if (!owns_a_shard()) return;
    for_others(level_.ranks.size(), [&](size_t other) { messages.send(shards[level_.place], level_.ranks[other]); });
  }

 private:
  struct Messages {
    c10d::ProcessGroup& group;
    Piece& piece;
    int tag;
    size_t left_out;  // how many are to be

    void receive(const at::Tensor& part, int rank) {
      add(part, [&](auto& bytes) { return group.recv(bytes, rank, tag); });
    }

    void send(const at::Tensor& part, int rank) {
      add(part, [&](auto& bytes) { return group.send(bytes, rank, tag); });
    }

   private:
    template <typename Start>
    void add(const at::Tensor& part, const Start& start) {
      if (part.numel() == 0) return;
      if (left_out > 0) {
        --left_out;
        return;
      }
      std::vector<at::Tensor> bytes{part.view(at::kByte)};
      piece.works.push_back(start(bytes));
    }
  };

  static int tag(size_t round, const Piece& piece) {
    // Far from the small numbers that users give messages of their own.
    constexpr uint32_t first_tag = 0x46440000;
    return static_cast<int>(first_tag + kMostRounds * piece.tag + static_cast<uint32_t>(round));
  }

  // The first `count` ranks but this one. Each rank begins with the next one, or all would begin with the same.
  template <typename Function>
  void for_others(size_t count, const Function& function) const {
    for (size_t step = 1; step < level_.ranks.size(); ++step) {
      const auto place = (level_.place + step) % level_.ranks.size();
      if (place < count) function(place);
    }
  }

  // What each rank sends; this rank's is where it was packed. If the room is that of the sum, its row there stays free.
  std::vector<at::Tensor> rows_of(const Piece& piece, const at::Tensor& room, const Shards& shards) const {
    const auto& own = shards[level_.place];
    const bool is_sum = room.is_same(piece.sum);
    std::vector<at::Tensor> rows;
    for (size_t rank = 0; rank < level_.ranks.size(); ++rank) {
      const auto row = static_cast<int64_t>(is_sum || rank < level_.place ? rank : rank - 1);
      rows.push_back(rank == level_.place ? own : room.narrow(0, row * own.numel(), own.numel()));
    }
    return rows;
  }
};

// What travels are bytes: backends need not know the dtype.
class AllToAll : public Stages {
 public:
  using Stages::Stages;

  void start_sum(size_t, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const override {
    if (piece.sent > 0) return;
    const bool is_even = are_equal_parts(piece.wire, shards);
    const auto room = room_for(piece, shards, level_, level_.ranks.size(), is_even ? 0 : piece.wire.numel());
    auto output = rows_in(room, shards[level_.place]).view(at::kByte);
    auto all = piece.wire.view(at::kByte);
    std::vector<int64_t> sent, received;
    if (!is_even) {
      auto copies = room.narrow(0, room.numel() - piece.wire.numel(), piece.wire.numel());
      all = at::cat_out(copies, shards).view(at::kByte);
      for (const auto& shard : shards) sent.push_back(static_cast<int64_t>(shard.nbytes()));
      received.assign(shards.size(), sent[level_.place]);
    }
    piece.works.push_back(lane.alltoall_base(output, all, received, sent));
  }

  void add_up(const Piece& piece, const Shards& shards, const at::Tensor& target, Adder* adder) const override {
    const auto& own = shards[level_.place];
    if (own.numel() == 0) return;
    const auto rows = rows_in(piece.room, own).view({static_cast<int64_t>(level_.ranks.size()), -1});
    if (adder == nullptr) return sum_shards(rows, target);
    adder->add(piece.bucket, own.storage_offset(), rows.unbind(), target);
  }

  void start_spread(size_t, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const override {
    if (piece.sent > 0) return;
    auto own = shards[level_.place].view(at::kByte);
    auto all = whole(shards).view(at::kByte);
    piece.works.push_back(lane._allgather_base(all, own));
  }

 private:
  at::Tensor rows_in(const at::Tensor& room, const at::Tensor& own) const {
    return room.narrow(0, 0, static_cast<int64_t>(level_.ranks.size()) * own.numel());
  }

  // Of which the shards are equal parts.
  static at::Tensor whole(const Shards& shards) {
    const auto elements = static_cast<int64_t>(shards.size()) * shards.front().numel();
    return shards.front().as_strided({elements}, {1});
  }
};

class Collectives : public Stages {
 public:
  using Stages::Stages;

  void start_sum(size_t, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const override {
    const auto reduce_scatter = [&](at::Tensor& own, at::Tensor& all) { return lane._reduce_scatter_base(own, all); };
    start(piece, shards, reduce_scatter, [&](std::vector<at::Tensor>& shard, int owner) {
      c10d::ReduceOptions options;
      options.rootRank = owner;
      return lane.reduce(shard, options);
    });
  }

  void add_up(const Piece&, const Shards&, const at::Tensor&, Adder*) const override {}

  void start_spread(size_t, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const override {
    const auto all_gather = [&](at::Tensor& own, at::Tensor& all) { return lane._allgather_base(all, own); };
    start(piece, shards, all_gather, [&](std::vector<at::Tensor>& shard, int owner) {
      c10d::BroadcastOptions options;
      options.rootRank = owner;
      return lane.broadcast(shard, options);
    });
  }

 private:
  // One collective for all shards, or one for each that has elements.
  template <typename ForAll, typename ForOne>
  void start(Piece& piece, const Shards& shards, const ForAll& for_all, const ForOne& for_one) const {
    auto left_out = piece.sent;
    if (are_equal_parts(piece.wire, shards)) {
      auto own = shards[level_.place], all = piece.wire;
      if (left_out == 0) piece.works.push_back(for_all(own, all));
      return;
    }
    for (size_t owner = 0; owner < shards.size(); ++owner) {
      if (shards[owner].numel() == 0) continue;
      if (left_out > 0) {
        --left_out;
        continue;
      }
      std::vector<at::Tensor> shard{shards[owner]};
      piece.works.push_back(for_one(shard, static_cast<int>(owner)));
    }
  }
};

}  // namespace

std::unique_ptr<Stages> make_pairs(Level level) {
  return std::make_unique<Pairs>(std::move(level));
}

std::unique_ptr<Stages> make_all_to_all(Level level) {
  return std::make_unique<AllToAll>(std::move(level));
}

std::unique_ptr<Stages> make_collectives(Level level) {
  return std::make_unique<Collectives>(std::move(level));
}

bool goes_in_pairs(c10d::ProcessGroup& group, c10::Device device) {
  return device.is_cpu() && group.getBackend(device.type())->getBackendName() == "gloo";
}

std::unique_ptr<Stages> make_stages(c10d::ProcessGroup& group, c10::Device device, bool own_sums) {
  const auto level = all_ranks(static_cast<size_t>(group.getSize()), group.getRank());
  if (goes_in_pairs(group, device)) return make_pairs(level);
  return own_sums ? make_all_to_all(level) : make_collectives(level);
}

}  // namespace fastddp
