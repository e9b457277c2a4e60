// What a rank's page says. Nothing here needs torch: `fastddp ps` reads pages without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pages/shared_page.h"

namespace fastddp {

// What happens on a rank, as the reducer sees it. Up to `computed` it is what the thread that trains is doing from then on.
enum class What : uint8_t {
  nothing,          // no forward has begun
  forward,          // in the module
  after_forward,    // the loss, or whatever the user does
  backward,         // gradients are computed
  tick,             // the exchange of a bucket begins; a user's hook runs here
  finish,           // waits for a bucket's last collective
  closing,          // waits for what follows the buckets: status, sparse gradients, late ones
  after_backward,   // whatever the user does
  optimizer,        // in its step
  gather,           // waits for a bucket's parameters, which other ranks have stepped
  after_optimizer,  // data loading, evaluation, a checkpoint, or whatever the user does
  agree,            // waits for the other ranks in another collective of fastddp's
  // The same more exactly, for this rank's own times: for others see shown().
  module,    // forward, after what ranks do together before it
  hook,      // tick, if a user's hook runs
  computed,  // backward, when all gradients of this rank have come
  // Of a bucket.
  ready,     // its gradients are final
  starts,    // its first collective is about to start: without gradients that are missing, which are final now
  started,   // its first collective has started
  finished,  // its last collective is done, and gradients are written
  sent,      // its parameters are on their way, and could not be waited for
  gathered,  // or have been waited for
  // Of a window. A *step* lasts from a window's first forward to that of the next window.
  window,   // a new one: nothing has come yet
  opens,    // a forward that has gradients begins
  reduces,  // the first gradient of a backward that synchronises
  closed,   // what follows the buckets is done
  ends,     // well
  fails,
};
inline constexpr auto kLastDoing = What::computed;
inline What shown(What doing) {
  return doing == What::module     ? What::forward
         : doing == What::hook     ? What::tick
         : doing == What::computed ? What::backward
                                   : doing;
}
const char* to_string(What doing);  // a shown one

struct Moment {
  static Moment now(What what, std::optional<size_t> bucket = std::nullopt);
  What what;
  std::optional<size_t> bucket;
  uint64_t time;  // on the machine's clock, ns
};

// The first bucket whose collective has ended for the host, but not on the device.
struct DeviceWait {
  size_t window;  // its number, from 1; of parameters, that of the next one
  size_t bucket;
  bool has_begun;      // the device has come to the collective: it waits for other ranks
  bool of_parameters;  // of the bucket's, not of its gradients
  bool operator==(const DeviceWait&) const = default;
};

// Which process a rank is, and how it ends.
struct OfProcess {
  Process process;
  std::string host;
  int rank = -1, ranks = 0;
  bool process_ends = false;  // the interpreter is about to end
  // A collective outside of backward has failed in this step, because another rank has ended.
  bool fails_for_others = false;
  std::string error;  // why the process ends, in words; empty: no known error
};

// What changes whenever training goes on.
struct Pulse {
  What doing = What::nothing;
  uint64_t since = 0;             // on the machine's clock, ns
  size_t windows = 0;             // that have ended
  size_t tick = 0, finished = 0;  // buckets whose ticks have begun; buckets that are finished
  uint64_t gradients = 0;         // that have come, ever
  std::optional<DeviceWait> device_wait;
  bool operator==(const Pulse&) const = default;
};

// Where a rank is in its step.
struct Position : Pulse {
  double seconds = 0;                // how long it has been `doing` this
  std::optional<size_t> bucket;      // the bucket that `doing` is about
  bool runs_user_code = false;       // a Python hook runs
  std::optional<uint64_t> sequence;  // of the process group, when the window's last collective was started
};

// One reading, in numbers and names. Each value was true at some moment of the reading: other values may be newer.
struct Snapshot : OfProcess, Position {
  static constexpr size_t kLanes = 2;  // at most

  // Collectives of a lane, a process group over which buckets are dealt. c10d numbers them: collective_seq_id in its flight
  // recorder.
  struct Collectives {
    size_t lane;
    uint64_t first, last;
  };
  struct OfBucket {
    std::optional<double> started;  // seconds ago, in the open window; none: not yet
    uint64_t bytes;
    std::vector<Collectives> collectives;  // that its tick has started
    std::vector<size_t> members;
  };

  size_t number;                   // of the wrapper in its process
  uint64_t job;                    // the same for all ranks that train one model together; 0: not said
  size_t generation;               // how often the model has been given other ranks
  std::string script;              // that the process runs; empty: not said
  std::vector<std::string> names;  // of parameters

  uint32_t state;  // of the window: WindowState
  std::optional<size_t> last_parameter;
  double device_seconds;  // how long `device_wait` has been the same
  std::vector<OfBucket> buckets;
  std::vector<bool> came;            // by parameter, in the window that is open
  std::vector<double> step_seconds;  // of the last steps, from end to end

  // The bucket's parameters whose gradients have not come, and all of the model's.
  std::vector<size_t> missing(size_t bucket) const;
  std::vector<size_t> missing() const;
};

// Reads the page of another process. `bytes`: of a page in memory, which is named `path`. Raises std::runtime_error if it is no
// page, or one of another version.
Snapshot read_page(const std::string& path);
Snapshot read_page(const std::byte* data, size_t bytes, const std::string& path);
// None: it has gone, is half written, of another version, or no page.
std::optional<Snapshot> try_to_read_page(const std::string& path);

// Of the process that has written a page of any version; unknown, if it is no page. The beginning of a page never changes.
Life life_of_owner(const std::string& path);

// Removes pages of processes that are gone, but for those of a job that has others here: they say what a rank did last.
void remove_left_pages();

}  // namespace fastddp
