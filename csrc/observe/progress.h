// What a rank is doing now, for other threads and for other processes of the same user.
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
  nothing,          // no forward has begun
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

// The first bucket whose collective has ended for the host, but not on the device.
struct DeviceWait {
  size_t window;  // its number, from 1
  size_t bucket;
  bool has_begun;  // the device has come to the collective: it waits for other ranks
  bool operator==(const DeviceWait&) const = default;
};

// One reading, in numbers and names. Each value was true at some moment of the reading: other values may be newer.
struct Snapshot {
  // Collectives of a lane, a process group over which buckets are dealt. c10d numbers them: collective_seq_id in its flight
  // recorder.
  struct Collectives {
    size_t lane;
    uint64_t first, last;
  };
  struct OfBucket {
    // Seconds ago, in the open window; none: not yet.
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
  std::string script;              // that the process runs; empty: not said
  std::vector<std::string> names;  // of parameters

  Doing doing;
  double seconds;                // how long it has been doing this
  std::optional<size_t> bucket;  // the bucket that `doing` is about
  uint32_t state;                // of the window: WindowState
  size_t windows;                // that have ended
  size_t tick, finished;         // buckets whose ticks have begun; buckets that are finished
  uint64_t gradients;            // that have come, ever
  std::optional<size_t> last_parameter;
  std::optional<uint64_t> sequence;  // of the process group, when the window's last collective was started
  bool runs_user_code;               // a Python hook runs
  std::optional<DeviceWait> device_wait;
  double device_seconds;  // how long `device_wait` has been the same
  bool process_ends;      // the interpreter is about to end
  bool fails_for_others;  // a collective outside of backward has failed in this window, because another rank has ended
  std::string error;      // why the process ends, in words; empty: no known error
  std::vector<OfBucket> buckets;
  std::vector<bool> came;            // by parameter, in the window that is open
  std::vector<double> step_seconds;  // of the last steps, from end to end

  // The bucket's parameters whose gradients have not come, and all of the model's.
  std::vector<size_t> missing(size_t bucket) const;
  std::vector<size_t> missing() const;
};

// Removes pages of processes that are gone, an hour after somebody has found them there.
void remove_left_pages();

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
  static constexpr size_t kLanes = 2;
  using Sequences = std::array<std::optional<uint64_t>, kLanes>;
  void bucket_starts(const Sequences& sequences);
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
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

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
    UserCode(const UserCode&) = delete;
    UserCode& operator=(const UserCode&) = delete;

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
  // Reads the page of another process. Raises c10::Error if it is no page, or one of another version.
  static Snapshot read(const std::string& path);
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
