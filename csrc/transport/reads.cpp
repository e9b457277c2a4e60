#include "transport/reads.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/record_function.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <utility>

#include "device/huge_pages.h"
#include "transport/outbox.h"

namespace fastddp {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kPartBytes = 1 << 20;   // what a thread reads at a time. It stays in cache until it is added up
constexpr auto kMeetingTag = 0x4643ffff;  // just below those of pieces, and far from the small numbers of users

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(at::kCPU)->getBackendOptions()->timeout;
  } catch (const std::exception&) {  // gloo of an older torch does not say
    return kBackendDefaultTimeout;
  }
}

// What a rank waits for on other ranks' outboxes.
class Look : public c10d::Work {
 public:
  Look(std::vector<RemoteRank> at, uint64_t meeting, std::chrono::milliseconds timeout, const char* name = nullptr,
       const at::Tensor& wire = {})
      : Work(-1, c10d::OpType::RECV, name, std::vector{wire}), at_(std::move(at)), meeting_(meeting), timeout_(timeout) {}

  // True also if nothing will come: then wait() raises.
  bool isCompleted() override {
    try {
      while (there_ < at_.size() && is_there(at_[there_])) ++there_;
      return there_ == at_.size();
    } catch (const std::exception&) {
      return true;
    }
  }

  bool wait(std::chrono::milliseconds) override {
    const auto begin = std::chrono::steady_clock::now();
    for (size_t looks = 0; there_ < at_.size(); ++looks) {
      if (is_there(at_[there_])) {
        ++there_;
        continue;
      }
      TORCH_CHECK_WITH(DistBackendError, !is_aborted_, "fastddp: the wait for process ", at_[there_].process, " was aborted");
      const auto waited = std::chrono::steady_clock::now() - begin;
      TORCH_CHECK_WITH(DistBackendError, waited < timeout_, "fastddp: process ", at_[there_].process, " did not come within ",
                       timeout_.count(), " ms, the process group's timeout");
      if (looks < kLooksInARow) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(waited < 10ms ? 20us : 200us);
      }
    }
    come();
    finish();
    return true;
  }

  void abort() override { is_aborted_ = true; }

 protected:
  virtual bool is_there(const RemoteRank& rank) const = 0;
  virtual void come() {}

  const std::vector<RemoteRank> at_;
  const uint64_t meeting_;

 private:
  static constexpr size_t kLooksInARow = 100;

  const std::chrono::milliseconds timeout_;
  size_t there_ = 0;  // the first ones
  std::atomic<bool> is_aborted_{false};
};

// They have read what this rank has lent.
class Acks : public Look {
 public:
  using Look::Look;

 protected:
  bool is_there(const RemoteRank& rank) const override { return rank.has_ended(meeting_); }
};

// A shard in the memory of another rank.
struct Remote {
  RemoteRank rank;
  uint64_t address;

  // Reads as many elements as `target` has, from element `begin` on.
  void read(int64_t begin, const at::Tensor& target) const {
    const auto from = address + static_cast<uint64_t>(begin) * target.element_size();
    rank.read(from, target.mutable_data_ptr(), target.nbytes());
  }
};

// Calls function(begin, count) for parts of `elements`, by all threads.
template <typename Function>
void for_parts(int64_t elements, int64_t elements_in_a_part, const Function& function) {
  const auto parts = (elements + elements_in_a_part - 1) / elements_in_a_part;
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t end) {
    for (auto part = first; part < end; ++part) {
      const auto begin = part * elements_in_a_part;
      function(begin, std::min(elements_in_a_part, elements - begin));
    }
  });
}

// Bytes of a shard, from those of the first one. They are the same on all ranks.
uint64_t offset(const Shards& shards, size_t place) {
  return static_cast<uint64_t>(shards[place].storage_offset() - shards[0].storage_offset()) * shards[0].element_size();
}

class Reads : public Owners {
 public:
  Reads(Level level, const Processes& processes, c10d::ProcessGroup& lane)
      : Owners(std::move(level)), timeout_(timeout_of(lane)) {
    const auto outboxes = exchange_outboxes(lane);
    for (size_t place = 0; place < level_.ranks.size(); ++place) {
      const auto rank = level_.ranks[place];
      ranks_.push_back({processes[static_cast<size_t>(rank)], outboxes[place]});
    }
  }

  void start_sum(size_t round, c10d::ProcessGroup&, Piece& piece, const Shards& shards, const Sum& sum) const override {
    const bool reads = owns_a_shard() && shards[level_.place].numel() > 0;
    const auto owners = with_elements(shards);
    const auto add = [this, shards, sum, bucket = piece.bucket](const auto& from) { add_up(bucket, from, shards, sum); };
    const auto name =
        sum.is_last ? Name{"c10d::reduce_scatter_", "gloo:reduce_scatter"} : Name{"c10d::allreduce_", "gloo:all_reduce"};
    start(round, piece, shards, {name, reads ? others(level_.ranks.size()) : Places(), level_.place, add},
          sum.is_last ? owners : Places());
  }

  // Done where the shards were read.
  void add_up(const Piece&, const Shards&, const Sum&) const override {}

  void start_spread(size_t round, c10d::ProcessGroup&, Piece& piece, const Shards& shards) const override {
    const auto owners = with_elements(shards);
    const bool lends = owns_a_shard() && shards[level_.place].numel() > 0;
    const auto copy = [shards, owners](const std::vector<Remote>& from) {
      for (size_t i = 0; i < owners.size(); ++i) {
        const auto& shard = shards[owners[i]];
        for_parts(shard.numel(), kPartBytes / shard.element_size(),
                  [&](int64_t begin, int64_t count) { from[i].read(begin, shard.narrow(0, begin, count)); });
      }
    };
    const Name name{"c10d::allgather_", "gloo:all_gather"};
    start(round, piece, shards, {name, owners, std::nullopt, copy}, lends ? others(level_.ranks.size()) : Places());
  }

 private:
  using Places = std::vector<size_t>;

  // The collective in whose place a rank reads: what launches it, and what runs, in profiles. An allreduce ends with an all-gather.
  struct Name {
    const char *launch, *run;
  };

  // Whose memory this rank reads, which shard there (none: their own), and what it does with that.
  struct Plan {
    Name name;
    Places from;
    std::optional<size_t> shard;
    std::function<void(const std::vector<Remote>&)> read;
  };

  class Reading : public Look {
   public:
    Reading(const Reads& reads, uint64_t meeting, uint64_t tag, const at::Tensor& wire, const Shards& shards, Plan plan)
        : Look(reads.ranks_at(plan.from), meeting, reads.timeout_, plan.name.run, wire),
          outbox_(reads.outbox_),
          tag_(tag),
          plan_(std::move(plan)) {
      for (const auto place : plan_.from) offsets_.push_back(offset(shards, plan_.shard.value_or(place)));
    }

    // If nobody has waited for it, it reads nothing any more.
    ~Reading() override { outbox_.end(meeting_); }

   protected:
    bool is_there(const RemoteRank& rank) const override { return rank.has_begun(meeting_); }

    void come() override {
      std::vector<Remote> from;
      for (size_t i = 0; i < at_.size(); ++i) from.push_back({at_[i], at_[i].address(meeting_, tag_) + offsets_[i]});
      plan_.read(from);
      outbox_.end(meeting_);
    }

   private:
    const Outbox outbox_;
    const uint64_t tag_;
    const Plan plan_;
    std::vector<uint64_t> offsets_;
  };

  void start(size_t round, Piece& piece, const Shards& shards, Plan plan, const Places& acks_from) const {
    if (piece.sent > 0) return;
    const auto meeting = meetings_++;
    const auto tag = static_cast<uint64_t>(piece.tag) * kMostRounds + round;
    const auto* const memory = static_cast<const char*>(shards[0].storage().data());
    outbox_.begin(
        meeting, tag,
        reinterpret_cast<uint64_t>(memory) + static_cast<uint64_t>(shards[0].storage_offset()) * shards[0].element_size());
    if (plan.from.empty()) {
      outbox_.end(meeting);
    } else {
      RECORD_FUNCTION(plan.name.launch, std::vector<c10::IValue>());
      piece.works.push_back(c10::make_intrusive<Reading>(*this, meeting, tag, piece.wire, shards, std::move(plan)));
    }
    if (!acks_from.empty()) piece.acks.push_back(c10::make_intrusive<Acks>(ranks_at(acks_from), meeting, timeout_));
  }

  std::vector<uint64_t> exchange_outboxes(c10d::ProcessGroup& lane) const {
    const auto count = static_cast<int64_t>(level_.ranks.size());
    const auto outboxes = at::full({count}, static_cast<int64_t>(outbox_.address()), at::kLong);
    Works works;
    level_.for_others(level_.ranks.size(), [&](size_t other) {
      std::vector<at::Tensor> theirs{outboxes.narrow(0, static_cast<int64_t>(other), 1)};
      works.push_back(lane.recv(theirs, level_.ranks[other], kMeetingTag));
    });
    std::vector<at::Tensor> own{at::full({1}, static_cast<int64_t>(outbox_.address()), at::kLong)};
    level_.for_others(level_.ranks.size(),
                      [&](size_t other) { works.push_back(lane.send(own, level_.ranks[other], kMeetingTag)); });
    for (const auto& work : works) work->wait();
    const auto* const found = outboxes.const_data_ptr<int64_t>();
    return {found, found + count};
  }

  // Ranks are added in the order of Pairs.
  void add_up(size_t bucket, const std::vector<Remote>& remotes, const Shards& shards, const Sum& sum) const {
    const auto& own = shards[level_.place];
    const auto size = static_cast<int64_t>(own.element_size());
    const auto count_of_others = static_cast<int64_t>(remotes.size());
    const auto part = std::max<int64_t>(1, kPartBytes / (size * sum.unit * count_of_others)) * sum.unit;
    const auto bytes = std::min(part, own.numel()) * size;
    const auto copies = copies_of_threads(bytes * count_of_others);
    const auto places = others(level_.ranks.size());
    for_parts(own.numel(), part, [&](int64_t begin, int64_t count) {
      std::vector<at::Tensor> parts(level_.ranks.size());
      parts[level_.place] = own.narrow(0, begin, count);
      for (size_t i = 0; i < remotes.size(); ++i) {
        const auto copy = copies.select(0, at::get_thread_num()).narrow(0, static_cast<int64_t>(i) * bytes, count * size);
        parts[places[i]] = copy.view(own.scalar_type());
        remotes[i].read(begin, parts[places[i]]);
      }
      sum_parts(level_, bucket, parts, sum.target.narrow(0, begin, count), sum.adder);
    });
  }

  // [threads, bytes], kept for the next sum.
  at::Tensor copies_of_threads(int64_t bytes) const {
    const int64_t threads = at::get_num_threads();
    if (!copies_.defined() || copies_.numel() < threads * bytes) {
      const auto memory = empty_in_huge_pages(threads * bytes + (bytes < kPartBytes / 2 ? 0 : kHugePage), at::kByte);
      const auto address = reinterpret_cast<intptr_t>(memory.const_data_ptr());
      const auto skipped = bytes < kPartBytes / 2 ? 0 : first_huge_page(address) - address;
      copies_ = memory.narrow(0, skipped, threads * bytes);
    }
    return copies_.narrow(0, 0, threads * bytes).view({threads, bytes});
  }

  Places others(size_t count) const {
    Places places;
    level_.for_others(count, [&](size_t place) { places.push_back(place); });
    return places;
  }

  Places with_elements(const Shards& shards) const {
    auto places = others(shards.size());
    std::erase_if(places, [&](size_t place) { return shards[place].numel() == 0; });
    return places;
  }

  std::vector<RemoteRank> ranks_at(const Places& places) const {
    std::vector<RemoteRank> ranks;
    for (const auto place : places) ranks.push_back(ranks_[place]);
    return ranks;
  }

  const Outbox outbox_;
  const std::chrono::milliseconds timeout_;
  std::vector<RemoteRank> ranks_;  // of the level
  mutable uint64_t meetings_ = 0;
  mutable at::Tensor copies_;
};

}  // namespace

bool can_read(const Level& level, const Processes& processes) {
  return std::ranges::all_of(level.ranks, [&](int rank) {
    return static_cast<size_t>(rank) < processes.size() && processes[static_cast<size_t>(rank)] != 0;
  });
}

std::shared_ptr<const Owners> make_reads(Level level, const Processes& processes, c10d::ProcessGroup& lane) {
  return std::make_shared<Reads>(std::move(level), processes, lane);
}

}  // namespace fastddp
