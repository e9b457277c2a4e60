#include "transport/owners.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "transport/reads.h"
#include "transport/sum_shards.h"

// torch 2.11 knows the collectives by these names only.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace fastddp {
namespace {

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

// Messages between pairs of ranks: those of one piece in one round, as Owners starts them. Their memory has to live until they are waited for.
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
  static int tag(size_t round, const Piece& piece) {
    // Far from the small numbers that users give messages of their own.
    constexpr uint32_t first_tag = 0x46440000;
    return static_cast<int>(first_tag + kMostRounds * piece.tag + static_cast<uint32_t>(round));
  }

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

class Pairs : public Owners {
 public:
  using Owners::Owners;

  void start_sum(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards, const Sum&) const override {
    Messages messages{lane, piece, round};
    if (owns_a_shard()) {
      const auto rows = rows_of(piece, room_for(piece, shards, level_, level_.ranks.size() - 1), shards);
      level_.for_others(level_.ranks.size(), [&](size_t other) { messages.receive(rows[other], level_.ranks[other]); });
    }
    level_.for_others(shards.size(), [&](size_t owner) { messages.send(shards[owner], level_.ranks[owner]); });
  }

  void add_up(const Piece& piece, const Shards& shards, const Sum& sum) const override {
    if (!owns_a_shard() || sum.target.numel() == 0) return;
    sum_parts(level_, piece.bucket, rows_of(piece, piece.room, shards), sum.target, sum.adder);
  }

  void start_spread(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const override {
    Messages messages{lane, piece, round};
    level_.for_others(shards.size(), [&](size_t owner) { messages.receive(shards[owner], level_.ranks[owner]); });
    if (!owns_a_shard()) return;
    const auto& own = shards[level_.place];
    level_.for_others(level_.ranks.size(), [&](size_t other) { messages.send(own, level_.ranks[other]); });
  }

 private:
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
class AllToAll : public Owners {
 public:
  using Owners::Owners;

  bool takes_room() const override { return true; }

  void start_sum(size_t, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards, const Sum&) const override {
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

  void add_up(const Piece& piece, const Shards& shards, const Sum& sum) const override {
    const auto& own = shards[level_.place];
    if (own.numel() == 0) return;
    const auto rows = rows_in(piece.room, own).view({static_cast<int64_t>(level_.ranks.size()), -1});
    if (sum.adder == nullptr) return sum_shards(rows, sum.target);
    sum.adder->add(piece.bucket, own.storage_offset(), rows.unbind(), sum.target);
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

class Collectives : public Owners {
 public:
  using Owners::Owners;

  void start_sum(size_t, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards, const Sum&) const override {
    const auto reduce_scatter = [&](at::Tensor& own, at::Tensor& all) { return lane._reduce_scatter_base(own, all); };
    start(piece, shards, reduce_scatter, [&](std::vector<at::Tensor>& shard, int owner) {
      c10d::ReduceOptions options;
      options.rootRank = owner;
      return lane.reduce(shard, options);
    });
  }

  void add_up(const Piece&, const Shards&, const Sum&) const override {}

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

void sum_parts(const Level& level, size_t bucket, const Shards& parts, const at::Tensor& target, Adder* adder) {
  const auto& own = parts[level.place];
  if (adder != nullptr) return adder->add(bucket, own.storage_offset(), parts, target);  // a wire has its own storage
  if (c10::elementSize(target.scalar_type()) == 2) return sum_shards(parts, target);
  // In the order of ranks, whoever adds up. What others have sent is of no further use.
  auto sum = parts.front();
  for (size_t next = 1; next < parts.size(); ++next) {
    auto to = level.place == 0 || next + 1 == parts.size() ? target : parts.front();
    sum = at::add_out(to, sum, parts[next]);
  }
  if (parts.size() == 1) target.copy_(sum);
}

std::shared_ptr<const Owners> make_pairs(Level level, const Lanes& lanes) {
  if (can_read(level, lanes.processes())) return make_reads(std::move(level), lanes.processes(), *lanes.first());
  return std::make_shared<Pairs>(std::move(level));
}

std::shared_ptr<const Owners> make_all_to_all(Level level) {
  return std::make_shared<AllToAll>(std::move(level));
}

std::shared_ptr<const Owners> make_collectives(Level level) {
  return std::make_shared<Collectives>(std::move(level));
}

bool goes_in_pairs(c10d::ProcessGroup& group, c10::Device device) {
  return device.is_cpu() && group.getBackend(device.type())->getBackendName() == "gloo";
}

std::shared_ptr<const Owners> make_owners(const Lanes& lanes, c10::Device device, bool own_sums) {
  const auto level = all_ranks(static_cast<size_t>(lanes.ranks()), lanes.first()->getRank());
  if (goes_in_pairs(*lanes.first(), device)) return make_pairs(level, lanes);
  return own_sums ? make_all_to_all(level) : make_collectives(level);
}

}  // namespace fastddp
