#include "simulator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <algorithm>

#include "peers.h"

namespace fake_cuda {
namespace {

constexpr uint64_t kStepsBetweenChanges = 16;  // of a priority, on average

// A wait may come from Python, and other threads may need the interpreter before they enqueue what the wait is for.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

// Bodies run on the thread that happens to wait: its autograd, autocast and Python modes are none of their business.
struct PlainThread {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::autocast_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace

Simulator& Simulator::get() {
  // Never destroyed: tensors may be freed after static objects are gone.
  static auto* simulator = new Simulator();
  return *simulator;
}

Queue& Simulator::queue(c10::DeviceIndex device, int64_t id) {
  const std::lock_guard lock(mutex_);
  auto& queue = queues_[{device, id}];
  if (queue == nullptr) queue = std::make_unique<Queue>(Queue{device, id, nullptr});
  return *queue;
}

OpPtr Simulator::enqueue(Queue& queue, Work work) {
  if (queue.capture != nullptr) return queue.capture->record(queue, std::move(work));
  const std::lock_guard lock(mutex_);
  work.after.push_back(queue.last);
  return queue.last = add(&queue, std::move(work));
}

OpPtr Simulator::enqueue_anywhere(Work work) {
  const std::lock_guard lock(mutex_);
  return add(nullptr, std::move(work));
}

OpPtr Simulator::add(Queue* queue, Work work) {
  std::erase_if(work.after, [](const OpPtr& op) { return op == nullptr || op->done; });
  auto op = std::make_shared<Op>(std::move(work), ++numbers_, queue);
  op->blockers = op->work.after.size();
  for (const auto& blocker : op->work.after) blocker->successors.push_back(op);
  pending_.emplace(op->number, op);
  if (op->blockers == 0) ready_.emplace(op->number, op);
  if (op->work.peers) op->work.peers->announce(op);
  changed_.notify_all();
  return op;
}

OpPtr Simulator::last(const Queue& queue) const {
  const std::lock_guard lock(mutex_);
  return queue.last == nullptr || queue.last->done ? nullptr : queue.last;
}

std::vector<OpPtr> Simulator::pending_on(std::optional<c10::DeviceIndex> device) const {
  const std::lock_guard lock(mutex_);
  std::vector<OpPtr> found;
  for (const auto& [number, op] : pending_) {
    if (!device.has_value() || op->queue == nullptr || op->queue->device == *device) found.push_back(op);
  }
  return found;
}

void Simulator::wait_for(const OpPtr& op, const std::string& what) {
  wait_for_all(op == nullptr ? std::vector<OpPtr>{} : std::vector{op}, what);
}

void Simulator::wait_for_device(std::optional<c10::DeviceIndex> device, const std::string& what) {
  wait_for_all(pending_on(device), what);
}

void Simulator::wait_for_all(const std::vector<OpPtr>& ops, const std::string& what) {
  check_wait(what);
  Lock lock(mutex_);
  records_.waits.push_back(what);
  lock.unlock();
  if (!ops.empty()) run_until_done(ops);
  lock.lock();
  if (const auto error = std::exchange(error_, nullptr)) {
    lock.unlock();
    std::rethrow_exception(error);
  }
}

void Simulator::check_wait(const std::string& what) const {
  check_no_capture(("the host waits for " + what).c_str());
  TORCH_CHECK(!waits_forbidden, "the host waits for the device (", what, ") where it must not");
}

bool Simulator::query(const OpPtr& op) {
  TORCH_CHECK(failed_with == 0, "cudaErrorIllegalAddress: an illegal memory access was encountered (", failed_with.load(), ")");
  if (op == nullptr || op->done) return true;
  const WithoutGil without_gil;
  Lock lock(mutex_);
  const auto needed = with_ancestors({op});
  if (auto next = choose(needed, Policy::lazy)) {
    execute(next, lock);
  } else {
    call_peers(needed, lock);
  }
  return false;
}

void Simulator::run_until_done(const std::vector<OpPtr>& targets) {
  const WithoutGil without_gil;
  Lock lock(mutex_);
  const auto needed = with_ancestors(targets);
  const auto done = [&] { return std::ranges::all_of(targets, [](const OpPtr& op) { return op->done.load(); }); };
  while (!done()) step(needed, lock);
  while (policy_ == Policy::random && random_() % 2 == 0) {
    const auto surplus = choose({}, policy_);
    if (surplus == nullptr) break;
    execute(surplus, lock);
  }
}

void Simulator::run_collective(const OpPtr& op) {
  Lock lock(mutex_);
  const auto needed = with_ancestors({op});
  while (op->blockers > 0) step(needed, lock);
  execute(op, lock);
}

// Runs one operation, or lets another thread's come to an end.
void Simulator::step(const Needed& needed, Lock& lock) {
  if (auto op = choose(needed, policy_)) {
    execute(op, lock);
  } else if (!call_peers(needed, lock)) {
    changed_.wait(lock);
  }
}

Simulator::Needed Simulator::with_ancestors(const std::vector<OpPtr>& targets) {
  Needed needed;
  std::vector<OpPtr> stack = targets;
  while (!stack.empty()) {
    const auto op = stack.back();
    stack.pop_back();
    if (!op->done && needed.insert(op.get()).second) std::ranges::copy(op->work.after, std::back_inserter(stack));
  }
  return needed;
}

// Null if nothing that may run now can.
OpPtr Simulator::choose(const Needed& needed, Policy policy) {
  if (executing_) return nullptr;
  std::vector<OpPtr> all, necessary, others;  // the oldest first
  for (const auto& [number, op] : ready_) {
    if (op->work.peers) continue;
    all.push_back(op);
    (needed.contains(op.get()) ? necessary : others).push_back(op);
  }
  if (all.empty()) return nullptr;
  switch (policy) {
    case Policy::lazy:
      return necessary.empty() ? nullptr : necessary.back();
    case Policy::others_first:
      return others.empty() ? necessary.front() : others.back();
    case Policy::random:
      return choose_by_priority(all);
    case Policy::in_order:
      return all.front();
  }
  return nullptr;
}

OpPtr Simulator::choose_by_priority(const std::vector<OpPtr>& candidates) {
  const auto priority = [&](const OpPtr& op) {
    const auto [known, is_new] = priorities_.try_emplace(op->queue);
    if (is_new) known->second = random_();
    return known->second;
  };
  const auto chosen = *std::ranges::max_element(candidates, {}, priority);
  if (random_() % kStepsBetweenChanges == 0) priorities_[chosen->queue] = random_();
  return chosen;
}

// Asks for the collectives that everything else waits for now. Whether there was one to ask for.
bool Simulator::call_peers(const Needed& needed, Lock& lock) {
  for (const auto& [number, op] : ready_) {
    if (!op->work.peers || op->peers_called || !needed.contains(op.get())) continue;
    op->peers_called = true;
    const auto collective = op;  // another thread may run it meanwhile
    const auto peers = op->work.peers;
    lock.unlock();
    peers->call(collective);
    lock.lock();
    return true;
  }
  return false;
}

void Simulator::execute(const OpPtr& op, Lock& lock) {
  const bool blocks = op->work.peers != nullptr;
  ready_.erase(op->number);
  if (!blocks) executing_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    const PlainThread plain;
    if (op->work.body) op->work.body();
  } catch (c10::Error& failure) {
    failure.add_context("while the simulated device ran " + op->work.name);
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  op->work.body = nullptr;  // what it captured goes here, where nothing is locked
  op->work.peers = nullptr;
  lock.lock();
  if (!blocks) executing_ = false;
  if (error && !error_) error_ = error;
  records_.history.push_back(op->work.name);
  if (op->work.collective) ++records_.collectives;
  op->done = true;
  op->work.after.clear();
  pending_.erase(op->number);
  for (const auto& successor : op->successors) {
    if (--successor->blockers == 0) ready_.emplace(successor->number, successor);
  }
  op->successors.clear();
  changed_.notify_all();
}

void Simulator::restart(Policy policy, uint64_t seed) {
  run_until_done(pending_on(std::nullopt));
  waits_forbidden = false;
  failed_with = 0;
  const std::lock_guard lock(mutex_);
  error_ = nullptr;
  records_ = {};
  policy_ = policy;
  random_.seed(seed);
  priorities_.clear();
}

}  // namespace fake_cuda
