#include "graph.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace fake_cuda {
namespace {

std::set<const Graph*>& capturing() {
  static auto* graphs = new std::set<const Graph*>();
  return *graphs;
}

}  // namespace

int& capture_mode() {
  thread_local int mode = 0;
  return mode;
}

void check_no_capture(const char* what) {
  TORCH_CHECK(Simulator::get().captures == 0 || capture_mode() == kCaptureRelaxed,
              "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing: ", what);
}

Graph::~Graph() {
  stop();
}

bool Graph::is_capturing(const Graph* graph) {
  return capturing().contains(graph);
}

void Graph::begin(Queue& queue) {
  TORCH_CHECK(queue.id != 0, "cudaErrorStreamCaptureUnsupported: the default stream cannot be captured");
  TORCH_CHECK(queue.capture == nullptr, "cudaErrorIllegalState: the stream is being captured already");
  TORCH_CHECK(nodes_.empty() && queues_.empty(), "a graph is captured once");
  capturing().insert(this);
  ++Simulator::get().captures;
  queue.capture = this;
  queues_.push_back(&queue);
}

void Graph::stop() {
  if (capturing().erase(this) == 0) return;
  for (auto* queue : queues_) queue->capture = nullptr;
  --Simulator::get().captures;
}

void Graph::end() {
  stop();
  // What the origin's last node comes after, directly or not.
  std::set<const Op*> joined;
  std::vector<OpPtr> stack;
  if (auto origin = last(*queues_.front())) stack.push_back(origin);
  while (!stack.empty()) {
    const auto node = stack.back();
    stack.pop_back();
    if (!joined.insert(node.get()).second) continue;
    std::ranges::copy(node->work.after, std::back_inserter(stack));
  }
  for (const auto& [queue, node] : last_) {
    TORCH_CHECK(joined.contains(node.get()), "cudaErrorStreamCaptureUnjoined: stream ", queue->id,
                " joined the capture, and the capturing stream does not wait for its last operation, ",
                node->work.name);
  }
}

OpPtr Graph::record(Queue& queue, Work work) {
  // Work from outside is not part of the graph; only the allocators refer to any, and have their own ways.
  std::erase_if(work.after, [&](const OpPtr& op) { return std::ranges::find(nodes_, op) == nodes_.end(); });
  if (auto before = last(queue)) work.after.push_back(before);
  nodes_.push_back(std::make_shared<Op>(std::move(work), nodes_.size(), &queue));
  return last_[&queue] = nodes_.back();
}

OpPtr Graph::last(const Queue& queue) const {
  const auto found = last_.find(&queue);
  return found == last_.end() ? nullptr : found->second;
}

void Graph::wait(Queue& queue, const OpPtr& node) {
  if (queue.capture == nullptr) {
    queue.capture = this;
    queues_.push_back(&queue);
  }
  record(queue, {.name = "wait", .body = {}, .after = {node}});
}

void Graph::replay(Queue& queue) const {
  TORCH_CHECK(!queues_.empty() && !is_capturing(this), "a graph is replayed after its capture");
  TORCH_CHECK(queue.capture == nullptr, "cudaErrorStreamCaptureUnsupported: a graph is replayed during a capture");
  auto& simulator = Simulator::get();
  const auto before = simulator.last(queue);
  std::map<const Op*, OpPtr> copies;
  std::vector<OpPtr> all;
  for (const auto& node : nodes_) {
    auto work = node->work;
    for (auto& blocker : work.after) blocker = copies.at(blocker.get());
    work.after.push_back(before);
    all.push_back(copies[node.get()] = simulator.enqueue_anywhere(std::move(work)));
  }
  simulator.enqueue(queue, {.name = "end of graph", .body = {}, .after = std::move(all)});
}

}  // namespace fake_cuda
