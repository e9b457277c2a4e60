// A device whose streams are queues. What is enqueued runs only when the host waits for something, in an order that is as
// unkind as recorded events and the order within each stream allow.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace fake_cuda {

struct Queue;

// One piece of work. It holds no tensor: as on a GPU, nothing that is only going to be read or written stays alive for it.
struct Op {
  std::function<void()> run;
  std::vector<std::shared_ptr<Op>> after;
  Queue* queue;  // null: in no stream
  bool done = false;
  bool captured = false;  // part of a graph: it never runs itself, its copies do
};
using OpPtr = std::shared_ptr<Op>;

// A stream. Its address is the native handle.
struct Queue {
  c10::DeviceIndex device;
  int64_t id;
  OpPtr last;
  std::deque<OpPtr> pending;
  bool capturing = false;
  OpPtr last_captured;
};

// What a stream was given while it was captured, and what other streams were given that waited for it. A call that a
// capture does not allow raises, as it does in CUDA.
struct Graph {
  std::vector<OpPtr> ops;  // each behind those it depends on
};

enum class Policy {
  lazy,          // only what is needed for what the host waits for
  others_first,  // everything else first, as far as it can run
  random,        // any order, and some of what is not needed
};

class Simulator {
 public:
  static Simulator& get();

  // Held while anything below is called and while operations run. Recursive: an operation may enqueue nothing, but what
  // frees memory at its end may.
  std::recursive_mutex& mutex() {
    return mutex_;
  }

  c10::DeviceIndex device_count = 2;

  Queue& queue(c10::DeviceIndex device, int64_t id);
  int64_t new_stream() {
    return ++streams_;
  }

  OpPtr enqueue(Queue& queue, std::function<void()> run, std::vector<OpPtr> after = {});
  // Work that belongs to no stream: it runs some time after `after`.
  OpPtr enqueue_unordered(std::function<void()> run, std::vector<OpPtr> after);

  void begin_capture(Queue& origin);
  Graph end_capture();
  // Enqueues a copy of the graph: its order within is that of the capture, and no more.
  void replay(const Graph& graph, Queue& queue);
  // 0 outside of a capture; a number of its own within each.
  int capture_of(const Queue& queue) const {
    return queue.capturing ? captures_ : 0;
  }
  // Makes the stream wait for what an event recorded; `captured`: while its stream was captured.
  void block(Queue& queue, const OpPtr& recorded, bool captured);
  // Raises while anything is captured, unless this thread has relaxed the rules.
  void check_no_capture(const char* what) const;

  // Raises where the host must not wait.
  void check_wait(const char* what) const;

  // The host waits: until `op` (null: nothing) is done, or everything is. Raises what an operation raised.
  void wait_for(const OpPtr& op, const char* what);
  void wait_for_everything(const char* what);
  // Runs what is left, without being a wait of the program under test.
  void drain();

  void set_policy(Policy policy, uint64_t seed);
  // From now on a wait raises.
  void forbid_waits(bool forbidden) {
    waits_forbidden_ = forbidden;
  }

  size_t waits = 0;        // of the host
  size_t copies = 0;       // host to device
  size_t collectives = 0;  // that have run
  std::vector<std::string> launches;

 private:
  OpPtr capture(Queue& queue, std::function<void()> run, std::vector<OpPtr> after);
  void run_needed(const OpPtr& op);
  void run(const OpPtr& op);
  void count_wait(const char* what);
  void raise_error();
  std::vector<OpPtr> ready(const Queue* except) const;

  std::recursive_mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, int64_t>, std::unique_ptr<Queue>> queues_;
  std::vector<OpPtr> unordered_;
  int64_t streams_ = 0;
  Policy policy_ = Policy::lazy;
  std::mt19937_64 random_;
  bool waits_forbidden_ = false;
  std::exception_ptr error_;
  Queue* origin_ = nullptr;  // of the capture
  Graph capture_;
  int captures_ = 0;
};

// CU_STREAM_CAPTURE_MODE_*: what this thread may do while a stream is captured.
constexpr int kCaptureRelaxed = 2;
int& capture_mode();

}  // namespace fake_cuda
