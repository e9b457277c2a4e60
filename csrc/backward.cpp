#include "backward.h"

#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>

// GraphTask is no standard-layout type; every compiler that torch is built with supports this all the same.
#pragma GCC diagnostic ignored "-Winvalid-offsetof"

namespace fastddp {

// The engine hands out the address of one public member of the running task, and of no other.
Backward Backward::current() {
  using torch::autograd::GraphTask;
  const auto* const member = torch::autograd::get_current_graph_task_exec_info();
  const auto* const task =
      reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(member) - offsetof(GraphTask, exec_info_));
  Backward backward;
  backward.done_ = task->future_result_;
  return backward;
}

}  // namespace fastddp
