// Work that is recorded once and run many times, as a CUDA graph.
#pragma once

#include "simulator.h"

namespace fake_cuda {

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
  // Enqueues a copy of all nodes behind what `queue` was given.
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
