#include "autograd/backward.h"

#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>
#include <mutex>
#include <optional>

// GraphTask is no standard-layout type; every compiler that torch is built with supports this all the same.
#pragma GCC diagnostic ignored "-Winvalid-offsetof"

namespace fastddp {

struct Backward::Outcome {
  bool is_known() const {
    const std::lock_guard lock(mutex);
    return error.has_value();
  }

  mutable std::mutex mutex;
  bool raised = false;
  std::optional<std::string> error;  // set when the backward is over; of one that ended well empty
};

// The engine hands out the address of one public member of the running task, and of no other.
Backward Backward::current() {
  using torch::autograd::GraphTask;
  const auto* const member = torch::autograd::get_current_graph_task_exec_info();
  const auto* const task =
      reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(member) - offsetof(GraphTask, exec_info_));
  const auto outcome = std::make_shared<Outcome>();
  task->future_result_->addCallback([outcome](at::ivalue::Future& future) {
    const std::lock_guard lock(outcome->mutex);
    outcome->raised = future.hasError();
    outcome->error = outcome->raised ? future.tryRetrieveErrorMessage() : "";
  });
  Backward backward;
  backward.future_ = task->future_result_;
  backward.outcome_ = outcome;
  return backward;
}

bool Backward::runs() const {
  if (!outcome_) return false;
  const auto future = future_.lock();
  return future ? !future->completed() : !outcome_->is_known();
}

bool Backward::raised() const {
  if (!outcome_) return false;
  if (const auto future = future_.lock()) return future->hasError();
  const std::lock_guard lock(outcome_->mutex);
  return outcome_->raised;
}

std::string Backward::error() const {
  if (const auto future = future_.lock()) return future->tryRetrieveErrorMessage();
  const std::lock_guard lock(outcome_->mutex);
  return outcome_->error.value_or("");
}

}  // namespace fastddp
