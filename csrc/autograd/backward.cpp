#include "autograd/backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <utility>

#include "autograd/grad_hooks.h"
#include "errors/see.h"
#include "trip/user_code.h"

// GraphTask is not a standard-layout type, but every compiler that torch is built with supports offsetof on it.
#pragma GCC diagnostic ignored "-Winvalid-offsetof"

namespace fastddp {

struct Backward::Outcome {
  // The other fields are written before, and read only if this is true.
  std::atomic<bool> is_over{false};
  bool raised = false;
  std::string error;
};

namespace {

using torch::autograd::GraphTask;

// The engine hands out the address of only one member of the running task, so the task is found from that.
const GraphTask& current_task() {
  const auto* const member = torch::autograd::get_current_graph_task_exec_info();
  return *reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(member) - offsetof(GraphTask, exec_info_));
}

}  // namespace

Backward Backward::current() {
  const auto& task = current_task();
  const auto outcome = std::make_shared<Outcome>();
  task.future_result_->addCallback([outcome](at::ivalue::Future& future) {
    outcome->raised = future.hasError();
    if (outcome->raised) outcome->error = future.tryRetrieveErrorMessage();
    outcome->is_over = true;
  });
  Backward backward;
  backward.future_ = task.future_result_;
  backward.outcome_ = outcome;
  return backward;
}

bool Backward::runs() const {
  if (const auto future = future_.lock()) return !future->completed();
  return outcome_ && !outcome_->is_over;
}

bool Backward::raised() const {
  if (const auto future = future_.lock()) return future->hasError();
  return outcome_ && outcome_->is_over && outcome_->raised;
}

std::string Backward::error() const {
  if (const auto future = future_.lock()) return future->tryRetrieveErrorMessage();
  return outcome_ && outcome_->is_over ? outcome_->error : "";
}

void Backwards::watch(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_begin) {
  seen_early_ = on_backward_through(outputs, on_begin);
}

int Backwards::number() {
  return torch::autograd::get_current_graph_task_id();
}

bool Backwards::is_for_a_choice() {
  return !torch::autograd::get_current_graph_task_exec_info()->empty();
}

bool Backwards::is_inside_nested() {
  return is_inside_one() && current_task().reentrant_depth_ > 0;
}

// The engine counts down what a node still waits for, and keeps what has come.
bool Backwards::only_this_node_brings(torch::autograd::Node* accumulator) {
  auto& task = const_cast<GraphTask&>(current_task());  // for its lock
  const std::lock_guard lock(task.mutex_);
  const auto waits_for = task.dependencies_.find(accumulator);
  return waits_for != task.dependencies_.end() && waits_for->second == 1 && !task.not_ready_.contains(accumulator);
}

void Backwards::note(std::function<void()> on_end) {
  last_ = Backward::current();
  number_ = number();
  when_this_one_ends(std::move(on_end));
}

void Backwards::when_this_one_ends(std::function<void()> call) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(call));
}

void Backwards::let_last_end(std::mutex& held) const {
  constexpr auto patience = std::chrono::minutes(10);
  const auto begin = std::chrono::steady_clock::now();
  while (last_.runs()) {
    TORCH_CHECK(std::chrono::steady_clock::now() - begin < patience,
                "fastddp: a forward was called while a backward of the same model ran in another thread, which has not ended "
                "for ",
                patience.count(), " minutes. If that one waits for this thread, call the model after backward.", see("FD014"));
    const Unlocked unlocked(held);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace fastddp
