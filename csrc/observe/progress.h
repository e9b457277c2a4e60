// What a rank is doing now, for other threads and for other processes of the same user.
#pragma once

#include <c10/macros/Macros.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pages/snapshot.h"

namespace fastddp {

// The thread that runs forward and backward writes it, without a lock: a gradient takes three stores. A reader takes what it
// finds, even in the middle of a change.
class Progress {
 public:
  Progress(const std::vector<std::string>& parameters, int rank, int ranks);
  ~Progress();

  // `script`: that the process runs.
  void belongs_to(uint64_t job, const std::string& script);
  // The buckets are replaced.
  void plan(const std::vector<std::vector<size_t>>& buckets, const std::vector<uint64_t>& bytes);
  void window(uint32_t state, size_t ended);
  void window_begins();
  Doing doing() const;
  void doing(Doing doing);
  void doing(Doing doing, size_t bucket);

  void gradient(size_t parameter);
  void bucket_ready(size_t bucket);
  // How many collectives each lane has begun, where its backend counts them.
  static constexpr size_t kLanes = Snapshot::kLanes;
  using Sequences = std::array<std::optional<uint64_t>, kLanes>;
  void bucket_starts(const Sequences& sequences) { before_ = sequences; }
  void bucket_started(size_t bucket, std::optional<uint64_t> sequence, const Sequences& sequences);
  void bucket_arrived(size_t bucket);
  // For the thread that watches (device_progress.h).
  void device_waits(const std::optional<DeviceWait>& wait);
  // A collective outside of backward has failed, because another rank has ended.
  void fails_for_others();
  // `stays`: whether the page stays, for others to read. A forked process says nothing for its parent.
  void process_ends(const std::string& error, bool stays);

  // While it lives, the calling thread may wait for other ranks.
  class Wait {
   public:
    Wait(Progress& progress, Doing doing, size_t bucket);
    ~Wait();
    C10_DISABLE_COPY_AND_ASSIGN(Wait);

   private:
    Progress& progress_;
    const Doing before_;
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

  // What changes whenever training goes on.
  struct Pulse {
    Doing doing;
    uint64_t since;  // on the machine's clock, ns
    size_t windows, tick, finished;
    uint64_t gradients;
    std::optional<DeviceWait> device_wait;
    bool operator==(const Pulse&) const = default;
  };
  Pulse pulse() const;
  // Seconds of the longest step that is remembered; 0: none has ended.
  double longest_step() const;

  Snapshot read() const;
  // Empty: nobody else can read it.
  const std::string& path() const;
  int rank() const;
  int ranks() const;

 private:
  static constexpr size_t kNone = ~uint32_t{0};
  struct Page;

  std::unique_ptr<Page> page_;
  uint32_t window_ = 1;  // the number of the open window, or of the next one
  Sequences before_;     // when the current tick began
};

}  // namespace fastddp
