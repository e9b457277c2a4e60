// What a rank is doing now, for other threads and for other processes of the same user.
#pragma once

#include <c10/macros/Macros.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pages/layout.h"
#include "pages/snapshot.h"

namespace fastddp {

// How long this thread has waited for collectives in total.
inline thread_local std::chrono::steady_clock::duration waited_for_collectives{};

// The thread that runs forward and backward writes it, without a lock: a gradient takes three stores. A reader takes what it
// finds, even in the middle of a change.
class Progress {
 public:
  Progress(const std::vector<std::string>& parameters, int rank, int ranks);

  // `script`: that the process runs. `generation`: how often the model has been given other ranks.
  void belongs_to(uint64_t job, const std::string& script, uint32_t generation);
  // The buckets are replaced.
  void plan(const std::vector<std::vector<size_t>>& buckets, const std::vector<uint64_t>& bytes);
  void window(uint32_t state, size_t ended);
  // What the thread that trains is doing, and since when.
  Moment doing() const { return page::moment_of(live_.doing.load(std::memory_order_acquire)); }
  void happened(const Moment& moment);
  void gradient(size_t parameter);
  // How many collectives the process group and each lane have begun, where their backends count them. Told before a bucket
  // `starts` and before it has `started`.
  static constexpr size_t kLanes = Snapshot::kLanes;
  using Sequences = std::array<std::optional<uint64_t>, kLanes>;
  void begun(std::optional<uint64_t> sequence, const Sequences& of_lanes) {
    sequence_ = sequence;
    before_ = std::exchange(begun_, of_lanes);
  }
  // For the thread that watches (device_progress.h).
  void device_waits(const std::optional<DeviceWait>& wait);
  // A collective outside of backward has failed, because another rank has ended.
  void fails_for_others();
  // `stays`: whether the page stays, for others to read. A forked process says nothing for its parent.
  void process_ends(const std::string& error, bool stays);

  // While it lives, the calling thread may wait for other ranks.
  class Wait {
   public:
    Wait(Progress& progress, What doing, size_t bucket);
    ~Wait();
    C10_DISABLE_COPY_AND_ASSIGN(Wait);

   private:
    Progress& progress_;
    const What before_;
    Progress* const outer_;
  };

  // While it lives, this thread runs a user's code, and does not wait.
  class UserCode {
   public:
    UserCode();
    ~UserCode();
    C10_DISABLE_COPY_AND_ASSIGN(UserCode);

   private:
    Progress* const progress_;
  };

  Pulse pulse() const { return page::pulse_of(live_); }
  // How many have ended.
  size_t windows() const { return live_.windows; }
  // Seconds of the longest step that is remembered; 0: none has ended.
  double longest_step() const;

  Snapshot read() const { return read_page(memory_.data(), rooms_.bytes, "this rank's page"); }
  // Empty: nobody else can read it.
  const std::string& path() const { return memory_.path(); }
  int rank() const { return header_.rank; }
  int ranks() const { return header_.ranks; }

 private:
  page::BucketRow& row(size_t bucket) { return bucket < header_.buckets ? buckets_[bucket] : not_noted_; }
  void started(size_t bucket, uint64_t time);
  // The number of the open window, or of the next one.
  uint32_t window() const { return live_.windows + 1; }

  const page::Header header_;
  const page::Rooms rooms_{header_};
  SharedPage memory_{rooms_.bytes};
  page::Live& live_;
  page::BucketRow* const buckets_;
  page::ParameterRow* const parameters_;
  page::BucketRow not_noted_{};
  std::optional<uint64_t> sequence_;
  Sequences begun_, before_;
};

}  // namespace fastddp
