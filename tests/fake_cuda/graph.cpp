#include "simulator.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace fake_cuda {
namespace {

std::set<const Graph*>& capturing() {
  static auto* graphs = new std::set<const Graph*>();
  return *graphs;
}

}  // namespace

void check_no_capture(const char* what) {
  constexpr int relaxed = 2;
  TORCH_CHECK(Simulator::get().captures == 0 || capture_mode == relaxed,
              "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing: ", what);
}

Graph::Graph(Queue& origin) {
  capturing().insert(this);
  ++Simulator::get().captures;
  join(origin);
}

bool Graph::is_capturing(const Graph* graph) {
  return capturing().contains(graph);
}

void Graph::join(Queue& queue) {
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
  std::set<OpPtr> joined;
  std::vector<OpPtr> stack{last(*queues_.front())};
  while (!stack.empty()) {
    const auto node = stack.back();
    stack.pop_back();
    if (node != nullptr && joined.insert(node).second) std::ranges::copy(node->work.after, std::back_inserter(stack));
  }
  for (const auto& [queue, node] : last_) {
    TORCH_CHECK(joined.contains(node), "cudaErrorStreamCaptureUnjoined: stream ", queue->id,
                " joined the capture, and the capturing stream does not wait for its last operation, ", node->work.name);
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
  if (queue.capture == nullptr) join(queue);
  record(queue, {.name = "wait", .after = {node}});
}

void Graph::replay(Queue& queue) const {
  auto& simulator = Simulator::get();
  const auto before = simulator.last(queue);
  std::map<OpPtr, OpPtr> copies;
  std::vector<OpPtr> all;
  for (const auto& node : nodes_) {
    auto work = node->work;
    for (auto& blocker : work.after) blocker = copies.at(blocker);
    work.after.push_back(before);
    all.push_back(copies[node] = simulator.enqueue_anywhere(std::move(work)));
  }
  simulator.enqueue(queue, {.name = "end of graph", .after = std::move(all)});
}

}  // namespace fake_cuda
