// What a rank is doing, now: for another thread, and for other processes of the same user.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "observe/shared_page.h"

namespace fastddp {

// What the thread that trains is doing, as the reducer sees it.
enum class Doing : uint8_t {
  nothing,          // no forward has been
  forward,          // in the module
  after_forward,    // the loss, or whatever the user does
  backward,         // gradients are computed
  tick,             // the exchange of a bucket begins; a user's hook runs here
  finish,           // waits for a bucket's last collective
  closing,          // waits for what follows the buckets: status, sparse gradients, late ones
  after_backward,   // whatever the user does
  optimizer,        // in its step
  after_optimizer,  // data loading, evaluation, a checkpoint, or whatever the user does
};
const char* to_string(Doing doing);

// A bucket whose collective has not ended on the device, the first one, although the host is past it.
struct DeviceWait {
  size_t window;  // its number, from 1
  size_t bucket;
  bool has_begun;  // the device has come to the collective: it waits for others
  bool operator==(const DeviceWait&) const = default;
};

// A reading, in numbers and names. Each is what it was at some moment of the reading: other numbers may be newer.
struct Snapshot {
  // Of a process group over which buckets are dealt; by the numbers that c10d gives them, its flight recorder's
  // collective_seq_id.
  struct Collectives {
    size_t lane;
    uint64_t first, last;
  };
  struct OfBucket {
    // Seconds ago, in the window that is open; none: not yet.
    std::optional<double> ready, started, arrived;
    uint64_t bytes;
    std::vector<Collectives> collectives;  // that its tick has started
    std::vector<size_t> members;
  };

  Process process;
  std::string host;
  size_t number;  // of the wrapper in its process
  int rank, ranks;
  uint64_t job;                    // the same for all ranks that train one model together; 0: not said
  std::vector<std::string> names;  // of parameters

  Doing doing;
  double seconds;                // since when
  std::optional<size_t> bucket;  // which this is about
  uint32_t state;                // of the window: WindowState
  size_t windows;                // that have ended
  size_t tick, finished;         // buckets
  size_t complete;               // buckets whose gradients are all there when a wait began, the first ones of the plan
  uint64_t gradients;            // that have come, ever
  std::optional<size_t> last_parameter;
  std::optional<uint64_t> sequence;  // of the process group, when the window's last collective was started
  bool runs_user_code;               // a hook of Python's
  std::optional<DeviceWait> device_wait;
  double device_seconds;  // for which it is the same
  bool process_ends;      // the interpreter is about to end
  bool fails_for_others;  // a collective outside of backward has failed in this window, since another rank has ended
  std::string error;      // by which, in words; empty: by none that is known
  std::vector<OfBucket> buckets;
  std::vector<bool> came;            // by parameter, in the window that is open
  std::vector<double> step_seconds;  // of the last ones, from end to end

  // Those of the bucket that have not come.
  std::vector<size_t> missing(size_t bucket) const;
};

// Written by the thread that runs forward and backward, without a lock: a gradient takes three stores. A reader takes what
// it finds, also in the middle of a change.
class Progress {
 public:
  Progress(const std::vector<std::string>& parameters, int rank, int ranks);
  ~Progress();

  void belongs_to(uint64_t job);
  // Buckets become others.
  void plan(const std::vector<std::vector<size_t>>& buckets, const std::vector<uint64_t>& bytes);
  void window(uint32_t state, size_t ended);
  void window_begins();
  Doing doing() const;
  void doing(Doing doing);
  void doing(Doing doing, size_t bucket);

  void gradient(size_t parameter);
  void bucket_ready(size_t bucket);
  // How many collectives each lane has begun, where its backend counts them.
  static constexpr size_t kLanes = 2;
  using Sequences = std::array<std::optional<uint64_t>, kLanes>;
  void bucket_starts(const Sequences& sequences);
  void bucket_started(size_t bucket, std::optional<uint64_t> sequence, const Sequences& sequences);
  void bucket_arrived(size_t bucket);
  // By the thread that looks on (device_progress.h).
  void device_waits(const std::optional<DeviceWait>& wait);
  // A collective outside of backward has failed, since another rank has ended.
  void fails_for_others();
  // `stays`: the page, for others to read. A process that was forked says nothing for its parent.
  void process_ends(const std::string& error, bool stays);

  // While it lives, the calling thread may wait for other ranks.
  class Wait {
   public:
    Wait(Progress& progress, Doing doing, size_t bucket, size_t complete);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    Progress& progress_;
    const Doing before_;
    Progress* const outer_;
  };

  // While it lives, this thread, which may wait, runs code of a user's instead.
  class UserCode {
   public:
    UserCode();
    ~UserCode();
    UserCode(const UserCode&) = delete;
    UserCode& operator=(const UserCode&) = delete;

   private:
    Progress* const progress_;
  };

  struct Waiting {
    size_t window;
    size_t complete;
    double seconds;
  };
  // By any thread; none: nothing is waited for.
  std::optional<Waiting> waiting() const;

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
  // Of those that are remembered; 0: none has ended.
  double longest_step() const;

  Snapshot read() const;
  // Of another process. Raises c10::Error where the page is none, or of another version.
  static Snapshot read(const std::string& path);
  // Empty: nobody else can read it.
  const std::string& path() const;
  int rank() const;
  int ranks() const;

 private:
  static constexpr size_t kNone = ~uint32_t{0};
  struct Page;

  const std::unique_ptr<Page> page_;
  uint32_t window_ = 1;  // the number of the one that is open, or comes
  Sequences before_;     // the tick that is under way
};

}  // namespace fastddp
