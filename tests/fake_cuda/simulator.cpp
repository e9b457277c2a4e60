#include "simulator.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace fake_cuda {

Simulator& Simulator::get() {
  // Never destroyed: tensors may be freed after static objects are gone.
  static auto* simulator = new Simulator();
  return *simulator;
}

Queue& Simulator::queue(c10::DeviceIndex device, int64_t id) {
  const std::lock_guard lock(mutex_);
  auto& queue = queues_[{device, id}];
  if (queue == nullptr) queue = std::make_unique<Queue>(Queue{device, id, nullptr, {}});
  return *queue;
}

OpPtr Simulator::enqueue(Queue& queue, std::function<void()> run, std::vector<OpPtr> after) {
  const std::lock_guard lock(mutex_);
  std::erase_if(after, [](const OpPtr& op) { return op == nullptr || op->done; });
  if (queue.capturing) return capture(queue, std::move(run), std::move(after));
  if (queue.last != nullptr && !queue.last->done) after.push_back(queue.last);
  queue.last = std::make_shared<Op>(Op{std::move(run), std::move(after), &queue});
  queue.pending.push_back(queue.last);
  return queue.last;
}

OpPtr Simulator::enqueue_unordered(std::function<void()> run, std::vector<OpPtr> after) {
  const std::lock_guard lock(mutex_);
  std::erase_if(after, [](const OpPtr& op) { return op == nullptr || op->done; });
  unordered_.push_back(std::make_shared<Op>(Op{std::move(run), std::move(after), nullptr}));
  return unordered_.back();
}

void Simulator::set_policy(Policy policy, uint64_t seed) {
  const std::lock_guard lock(mutex_);
  policy_ = policy;
  random_.seed(seed);
}

void Simulator::run(const OpPtr& op) {
  if (op->queue != nullptr) {
    TORCH_INTERNAL_ASSERT(op->queue->pending.front() == op);
    op->queue->pending.pop_front();
  } else {
    std::erase(unordered_, op);
  }
  op->done = true;
  op->after.clear();
  const auto work = std::move(op->run);
  op->run = nullptr;
  try {
    if (work) work();
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
}

void Simulator::run_needed(const OpPtr& op) {
  std::vector<OpPtr> stack{op};
  while (!stack.empty()) {
    const auto top = stack.back();
    const auto before = stack.size();
    for (const auto& needed : top->after) {
      if (!needed->done) stack.push_back(needed);
    }
    if (stack.size() > before) continue;
    stack.pop_back();
    if (!top->done) run(top);
  }
}

// What could run now, not counting the queue `except`.
std::vector<OpPtr> Simulator::ready(const Queue* except) const {
  const auto can_run = [](const OpPtr& op) { return std::ranges::all_of(op->after, &Op::done, &OpPtr::operator*); };
  std::vector<OpPtr> found;
  for (const auto& [key, queue] : queues_) {
    if (queue.get() != except && !queue->pending.empty() && can_run(queue->pending.front())) {
      found.push_back(queue->pending.front());
    }
  }
  for (const auto& op : unordered_) {
    if (can_run(op)) found.push_back(op);
  }
  return found;
}

void Simulator::wait_for(const OpPtr& op, const char* what) {
  const std::lock_guard lock(mutex_);
  count_wait(what);
  if (op != nullptr && !op->done) {
    if (policy_ == Policy::others_first) {
      for (auto others = ready(op->queue); !others.empty(); others = ready(op->queue)) run(others.front());
    }
    while (policy_ == Policy::random && !op->done) {
      const auto candidates = ready(nullptr);
      run(candidates[random_() % candidates.size()]);
    }
    run_needed(op);
  }
  raise_error();
}

void Simulator::wait_for_everything(const char* what) {
  const std::lock_guard lock(mutex_);
  count_wait(what);
  drain();
  raise_error();
}

void Simulator::drain() {
  const std::lock_guard lock(mutex_);
  for (auto candidates = ready(nullptr); !candidates.empty(); candidates = ready(nullptr)) {
    run(candidates[policy_ == Policy::random ? random_() % candidates.size() : 0]);
  }
}

void Simulator::check_wait(const char* what) const {
  TORCH_CHECK(origin_ == nullptr, "operation not permitted when stream is capturing: the host waits for ", what);
  TORCH_CHECK(!waits_forbidden_, "the host waits for the device (", what, ") where it must not");
}

void Simulator::count_wait(const char* what) {
  check_wait(what);
  ++waits;
}

void Simulator::raise_error() {
  if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
}

int& capture_mode() {
  thread_local int mode = 0;
  return mode;
}

}  // namespace fake_cuda
