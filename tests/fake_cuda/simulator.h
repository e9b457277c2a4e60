// A device whose streams are queues. What is enqueued runs only when the host waits for something, in an order that is as
// unkind as recorded events and the order within each stream allow.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace fake_cuda {

class Graph;
class Peers;
struct Op;
using OpPtr = std::shared_ptr<Op>;

constexpr c10::DeviceIndex kDevices = 2;

// A stream.
struct Queue {
  c10::DeviceIndex device;
  int64_t id;
  OpPtr last;                // what was enqueued last; null: nothing ever
  Graph* capture = nullptr;  // where enqueued work is recorded instead; null: nowhere
};

// What to run, and after what. The body holds no tensors of the device: as on a GPU, memory does not stay alive because
// something is going to read or write it. It may run more than once (a graph's), and on any thread.
struct Work {
  std::string name;
  std::function<void()> body{};  // may be empty: then it only orders others
  std::vector<OpPtr> after{};
  bool collective = false;
  std::shared_ptr<Peers> peers{};  // not null: the body blocks until other ranks run theirs
};

// Work in a queue.
struct Op {
  Work work;
  uint64_t number;  // in the order of enqueuing
  Queue* queue;     // null: in none
  std::vector<OpPtr> successors{};
  size_t blockers = 0;  // how much of work.after is not done
  bool peers_called = false;
  std::atomic<bool> done{false};

  Op(Work its_work, uint64_t its_number, Queue* its_queue) : work(std::move(its_work)), number(its_number), queue(its_queue) {}
};

// In which order work runs once the host waits. Events and streams are obeyed always.
enum class Policy {
  lazy,          // only what the wait needs, the newest first; everything else as late as possible
  others_first,  // everything that the wait does not need and that can run, the newest first; then what it needs
  random,        // any order, and some more than what the wait needs (note [Random orders])
  in_order,      // as it was enqueued: no adversary, to tell an error of order from others
};

// Since the last reset.
struct Records {
  std::vector<std::string> waits;     // of the host: what for
  std::vector<std::string> launches;  // through the driver: names of kernels, but for what writes tables
  std::vector<std::string> history;   // names of all that ran, in this order
  size_t collectives = 0;             // that ran
  size_t uploads = 0;                 // copies from the host to the device, and tables that a kernel writes
};

// Note [Random orders]
// Choosing evenly among all that can run hardly ever keeps one stream back for long, and that is what shows most errors.
// So each stream has a random priority, the highest runs, and now and then one gets another.
class Simulator {
 public:
  static Simulator& get();

  // The stream of this number; 0 is the default stream.
  Queue& queue(c10::DeviceIndex device, int64_t id);

  OpPtr enqueue(Queue& queue, Work work);
  // Work in no stream: it runs some time after `work.after`.
  OpPtr enqueue_anywhere(Work work);
  // Everything that was enqueued there up to now; null if it is done.
  OpPtr last(const Queue& queue) const;

  // Raises where the host must not wait.
  void check_wait(const std::string& what) const;
  // The host waits until `op` (null: done) is done, or everything on the device (none: on all). Raises what an operation
  // raised.
  void wait_for(const OpPtr& op, const std::string& what);
  void wait_for_device(std::optional<c10::DeviceIndex> device, const std::string& what);
  // Whether it is done. Asking makes time pass: something that is needed for it runs after the answer, so that a loop of
  // questions ends.
  bool query(const OpPtr& op);
  // Runs what `op` needs, and itself, on this thread.
  void run_collective(const OpPtr& op);

  // Runs all there is and forgets it, errors and records; from now on work runs in this order.
  void restart(Policy policy, uint64_t seed);

  // Who looks or writes has them alone.
  template <typename Use>
  auto with_records(Use use) {
    const std::lock_guard lock(mutex_);
    return use(records_);
  }

  // From now on, a wait of the host raises.
  std::atomic<bool> waits_forbidden{false};
  // Not 0: what ran has failed with this error of the driver's. Until the restart each question raises, and the driver answers
  // what is asked of a device with it.
  std::atomic<int> failed_with{0};
  // The number of captures under way. While it is not 0, the host cannot wait.
  std::atomic<int> captures{0};

 private:
  using Needed = std::set<const Op*>;
  using Lock = std::unique_lock<std::mutex>;

  OpPtr add(Queue* queue, Work work);
  std::vector<OpPtr> pending_on(std::optional<c10::DeviceIndex> device) const;
  void wait_for_all(const std::vector<OpPtr>& ops, const std::string& what);
  void run_until_done(const std::vector<OpPtr>& targets);
  void step(const Needed& needed, Lock& lock);
  OpPtr choose(const Needed& needed, Policy policy);
  OpPtr choose_by_priority(const std::vector<OpPtr>& candidates);
  bool call_peers(const Needed& needed, Lock& lock);
  void execute(const OpPtr& op, Lock& lock);
  static Needed with_ancestors(const std::vector<OpPtr>& targets);

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // something is done
  std::map<std::pair<c10::DeviceIndex, int64_t>, std::unique_ptr<Queue>> queues_;
  std::map<uint64_t, OpPtr> pending_;  // enqueued and not done
  std::map<uint64_t, OpPtr> ready_;    // of these, those that could run
  bool executing_ = false;             // one body at a time, collectives apart
  uint64_t numbers_ = 0;
  Policy policy_ = Policy::lazy;
  std::mt19937_64 random_;
  std::map<const Queue*, uint64_t> priorities_;
  std::exception_ptr error_;
  Records records_;
};

// Note [Capture]
// While a stream is captured, what is enqueued there becomes a node of a graph and does not run. A stream that waits for
// an event recorded within the capture joins it. Events from outside cannot be waited for, the host cannot wait for
// anything, and every stream that joined must have been waited for by the end. Memory that is freed during the capture is
// given out again only within it, and never after it. A replay runs a copy of all nodes: their dependencies are kept, and
// no more than these.
class Graph {
 public:
  // Captures what `origin` is given.
  explicit Graph(Queue& origin);
  ~Graph() { stop(); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void end();
  // Enqueues a copy of all nodes after what `queue` was given.
  void replay(Queue& queue) const;

  // What a captured queue does instead of enqueuing.
  OpPtr record(Queue& queue, Work work);
  // The queue's last node.
  OpPtr last(const Queue& queue) const;
  // The queue waits for the node (null: for the capture's begin).
  void wait(Queue& queue, const OpPtr& node);

  static bool is_capturing(const Graph* graph);

 private:
  void join(Queue& queue);
  void stop();

  std::vector<OpPtr> nodes_;
  std::vector<Queue*> queues_;  // captured, the origin first
  std::map<const Queue*, OpPtr> last_;
};

// CU_STREAM_CAPTURE_MODE_*: what this thread may do while a stream is captured.
inline thread_local int capture_mode = 0;
// Raises while a stream is captured, unless this thread has relaxed the rules.
void check_no_capture(const char* what);

}  // namespace fake_cuda
