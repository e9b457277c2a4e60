#include "transport/reads.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "device/huge_pages.h"
#include "device/see.h"
#include "transport/pairs.h"

namespace fastddp {
namespace {

constexpr int64_t kPartBytes = 1 << 20;  // what a thread reads at a time. It stays in cache until it is added up
constexpr int kThanks = kMostRounds;     // is added to the tag of letters

ssize_t try_to_read(int process, uint64_t address, void* target, size_t bytes) {
  const iovec here{target, bytes}, there{reinterpret_cast<void*>(address), bytes};
  return process_vm_readv(process, &here, 1, &there, 1, 0);
}

// A shard in the memory of another rank.
struct Remote {
  int rank;
  int process;
  uint64_t address;

  // Reads as many elements as `target` has, from element `begin` on.
  void read(int64_t begin, const at::Tensor& target) const {
    auto from = address + static_cast<uint64_t>(begin) * target.element_size();
    auto* to = static_cast<char*>(target.mutable_data_ptr());
    for (auto left = target.nbytes(); left > 0;) {
      const auto bytes = try_to_read(process, from, to, left);
      TORCH_CHECK_WITH(DistBackendError, bytes > 0, "fastddp: this rank could read the memory of rank ", rank,
                       " (process ", process,
                       ") when training began, and now it cannot: ", bytes < 0 ? std::strerror(errno) : "nothing came",
                       ". The process may have ended.", see("FD015"));
      from += static_cast<uint64_t>(bytes);
      to += bytes;
      left -= static_cast<size_t>(bytes);
    }
  }
};

// Reads when it is waited for, after the letters, which are earlier works of the piece.
class Reading : public c10d::Work {
 public:
  using Read = std::function<void(const std::vector<Remote>&)>;

  // `letters` has an address for each of `from`, or zeros if they could not be asked for, which makes a window fail.
  Reading(c10d::ProcessGroup& lane, std::optional<int> tag_of_thanks, std::vector<Remote> from, at::Tensor letters,
          Read read)
      : Work(-1, c10d::OpType::RECV),
        lane_(lane),
        tag_of_thanks_(tag_of_thanks),
        from_(std::move(from)),
        letters_(std::move(letters)),
        read_(std::move(read)) {}

  bool wait(std::chrono::milliseconds) override {
    const auto* const addresses = letters_.const_data_ptr<int64_t>();
    for (size_t i = 0; i < from_.size(); ++i) from_[i].address = static_cast<uint64_t>(addresses[i]);
    if (std::ranges::find(from_, 0, &Remote::address) == from_.end()) read_(from_);
    if (tag_of_thanks_) thank();
    finish();
    return true;
  }

  void abort() override {
    if (auto* const awaited = awaited_.load()) awaited->abort();
  }

 private:
  void thank() {
    const at::DisableRecordFunctionGuard unseen;  // traces show what travels
    std::vector<at::Tensor> byte{at::zeros({1}, at::kByte)};
    for (const auto& remote : from_) thanks_.push_back(lane_.send(byte, remote.rank, *tag_of_thanks_));
    for (const auto& sent : thanks_) {
      awaited_ = sent.get();
      sent->wait();
    }
  }

  c10d::ProcessGroup& lane_;
  const std::optional<int> tag_of_thanks_;
  std::vector<Remote> from_;
  const at::Tensor letters_;
  const Read read_;
  Works thanks_;
  std::atomic<c10d::Work*> awaited_{nullptr};
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

class Reads : public Stages {
 public:
  Reads(Level level, Processes processes) : Stages(std::move(level)), processes_(std::move(processes)) {}

  void start_sum(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards,
                 const Sum& sum) const override {
    Meeting meeting{round, lane, piece, sum.is_last};
    if (owns_a_shard() && shards[level_.place].numel() > 0) meeting.from = others(level_.ranks.size());
    for (const auto owner : others(shards.size())) meeting.lend(owner, shards[owner]);
    const auto& own = shards[owns_a_shard() ? level_.place : 0];
    start(meeting, [this, own, sum, bucket = piece.bucket](const auto& remotes) { add_up(bucket, remotes, own, sum); });
  }

  // Done where the shards were read.
  void add_up(const Piece&, const Shards&, const Sum&) const override {}

  void start_spread(size_t round, c10d::ProcessGroup& lane, Piece& piece, const Shards& shards) const override {
    Meeting meeting{round, lane, piece, true};
    for (const auto owner : others(shards.size())) {
      if (shards[owner].numel() > 0) meeting.from.push_back(owner);
    }
    if (owns_a_shard()) {
      for (const auto other : others(level_.ranks.size())) meeting.lend(other, shards[level_.place]);
    }
    start(meeting, [shards, from = meeting.from](const auto& remotes) {
      for (size_t i = 0; i < from.size(); ++i) {
        const auto& shard = shards[from[i]];
        for_parts(shard.numel(), kPartBytes / shard.element_size(),
                  [&](int64_t begin, int64_t count) { remotes[i].read(begin, shard.narrow(0, begin, count)); });
      }
    });
  }

 private:
  // Which ranks of the level, by place, this rank reads from, and what it lends to which.
  struct Meeting {
    size_t round;
    c10d::ProcessGroup& lane;
    Piece& piece;
    bool with_thanks;
    std::vector<size_t> from;
    std::vector<std::pair<size_t, at::Tensor>> lent;

    void lend(size_t to, const at::Tensor& shard) {
      if (shard.numel() > 0) lent.emplace_back(to, shard);
    }
  };

  void start(const Meeting& meeting, Reading::Read read) const {
    Messages messages{meeting.lane, meeting.piece, meeting.round};
    const auto letters = at::zeros({static_cast<int64_t>(meeting.from.size())}, at::kLong);
    std::vector<Remote> remotes;
    for (const auto place : meeting.from) {
      const auto rank = level_.ranks[place];
      messages.receive(letters.narrow(0, static_cast<int64_t>(remotes.size()), 1), rank);
      remotes.push_back({rank, processes_[static_cast<size_t>(rank)], 0});
    }
    for (const auto& [to, shard] : meeting.lent) {
      messages.send(at::full({1}, reinterpret_cast<int64_t>(shard.const_data_ptr()), at::kLong), level_.ranks[to]);
    }
    const auto thanks = meeting.with_thanks ? std::optional(messages.tag() + kThanks) : std::nullopt;
    if (!remotes.empty()) {
      messages.add(
          [&] { return c10::make_intrusive<Reading>(meeting.lane, thanks, remotes, letters, std::move(read)); });
    }
    if (!thanks) return;
    const at::DisableRecordFunctionGuard unseen;
    for (const auto& [to, shard] : meeting.lent) {
      std::vector<at::Tensor> byte{at::zeros({1}, at::kByte)};
      meeting.piece.thanks.push_back(meeting.lane.recv(byte, level_.ranks[to], *thanks));
    }
  }

  std::vector<size_t> others(size_t count) const {
    std::vector<size_t> places;
    for_others(level_, count, [&](size_t place) { places.push_back(place); });
    return places;
  }

  // Ranks are added in the order of Pairs.
  void add_up(size_t bucket, const std::vector<Remote>& remotes, const at::Tensor& own, const Sum& sum) const {
    const auto unit = sum.adder != nullptr ? sum.adder->unit() : 1, size = static_cast<int64_t>(own.element_size());
    const auto others = static_cast<int64_t>(remotes.size());
    const auto part = std::max<int64_t>(1, kPartBytes / (size * unit * others)) * unit;
    const auto bytes = std::min(part, own.numel()) * size;
    const auto copies = copies_of_threads(bytes * others);
    for_parts(own.numel(), part, [&](int64_t begin, int64_t count) {
      std::vector<at::Tensor> parts(level_.ranks.size());
      parts[level_.place] = own.narrow(0, begin, count);
      auto copy = copies.select(0, at::get_thread_num());
      for (const auto& remote : remotes) {
        auto& into = parts[place_of(remote)];
        into = copy.narrow(0, 0, count * size).view(own.scalar_type());
        remote.read(begin, into);
        copy = copy.narrow(0, bytes, copy.numel() - bytes);
      }
      const auto target = sum.target.narrow(0, begin, count);
      sum_parts(level_, bucket, parts, target, sum.adder);
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

  size_t place_of(const Remote& remote) const {
    return static_cast<size_t>(std::ranges::find(level_.ranks, remote.rank) - level_.ranks.begin());
  }

  const Processes processes_;
  mutable at::Tensor copies_;
};

}  // namespace

void let_siblings_read() {
  prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);  // fails without Yama, where it is not needed
}

bool has_bytes(int process, uint64_t address, const std::string& bytes) {
  std::string found(bytes.size(), '\0');
  const auto count = try_to_read(process, address, found.data(), found.size());
  return count == static_cast<ssize_t>(bytes.size()) && found == bytes;
}

bool can_read(const Level& level, const Processes& processes) {
  return std::ranges::all_of(level.ranks, [&](int rank) {
    return static_cast<size_t>(rank) < processes.size() && processes[static_cast<size_t>(rank)] != 0;
  });
}

std::unique_ptr<Stages> make_reads(Level level, Processes processes) {
  return std::make_unique<Reads>(std::move(level), std::move(processes));
}

}  // namespace fastddp
