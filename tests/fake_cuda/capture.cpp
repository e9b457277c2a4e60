// Graphs: work that is recorded once and run many times.
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "simulator.h"

namespace fake_cuda {

void Simulator::begin_capture(Queue& origin) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(origin_ == nullptr, "a stream is being captured already");
  TORCH_CHECK(origin.id != 0, "the default stream cannot be captured");
  origin_ = &origin;
  origin.capturing = true;
  ++captures_;
}

Graph Simulator::end_capture() {
  const std::lock_guard lock(mutex_);
  std::unordered_set<Op*> joined;
  std::vector<OpPtr> stack{origin_->last_captured};
  while (!stack.empty()) {
    const auto op = stack.back();
    stack.pop_back();
    if (op == nullptr || !joined.insert(op.get()).second) continue;
    stack.insert(stack.end(), op->after.begin(), op->after.end());
  }
  origin_ = nullptr;
  bool all_joined = true;
  for (auto& [key, queue] : queues_) {
    const auto last = std::exchange(queue->last_captured, nullptr);
    if (std::exchange(queue->capturing, false)) all_joined = all_joined && (!last || joined.count(last.get()) == 1);
  }
  auto graph = std::exchange(capture_, {});
  TORCH_CHECK(all_joined, "capture ended with a stream that had joined it and was not joined back");
  return graph;
}

OpPtr Simulator::capture(Queue& queue, std::function<void()> run, std::vector<OpPtr> after) {
  TORCH_CHECK(std::ranges::all_of(after, &Op::captured, &OpPtr::operator*),
              "dependency created on uncaptured work in another stream");
  if (queue.last_captured != nullptr) after.push_back(queue.last_captured);
  queue.last_captured = std::make_shared<Op>(Op{std::move(run), std::move(after), nullptr, false, true});
  capture_.ops.push_back(queue.last_captured);
  return queue.last_captured;
}

void Simulator::block(Queue& queue, const OpPtr& recorded, bool captured) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!queue.capturing || captured, "dependency created on uncaptured work in another stream");
  if (captured) queue.capturing = true;
  enqueue(queue, {}, {recorded});
}

void Simulator::replay(const Graph& graph, Queue& queue) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(origin_ == nullptr, "operation not permitted when stream is capturing: a replay");
  std::unordered_map<Op*, OpPtr> copies;
  std::vector<OpPtr> all;
  for (const auto& op : graph.ops) {
    std::vector<OpPtr> after;
    for (const auto& needed : op->after) after.push_back(copies.at(needed.get()));
    if (after.empty()) after.push_back(queue.last);
    all.push_back(copies[op.get()] = enqueue_unordered(op->run, std::move(after)));
  }
  enqueue(queue, {}, std::move(all));
}

void Simulator::check_no_capture(const char* what) const {
  TORCH_CHECK(origin_ == nullptr || capture_mode() == kCaptureRelaxed,
              "operation not permitted when stream is capturing: ", what);
}

}  // namespace fake_cuda
