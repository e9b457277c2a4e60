// Operators that stand in compiled graphs: note [Handed over], autograd/grad_hooks.h.
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <optional>

#include "reducer/other_reducers.h"
#include "reducer/reducer.h"

namespace fastddp {
namespace {

void hand_over(const at::Tensor& gradient, const at::Tensor& parameter) {
  const auto [reducer, number] = OtherReducers::only_reducer_of(parameter);
  if (!reducer) return;
  std::optional<pybind11::gil_scoped_release> without_gil;
  if (PyGILState_Check() != 0) without_gil.emplace();
  reducer->hand_over(number, gradient);
}

// The parameter. Its gradient goes through hand_over().
class Passes : public torch::autograd::Function<Passes> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& parameter) {
    context->save_for_backward({parameter});
    return parameter.view_as(parameter);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    static const auto operation = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("fastddp::hand_over", "")
                                      .typed<void(const at::Tensor&, const at::Tensor&)>();
    if (gradients[0].defined()) operation.call(gradients[0], context->get_saved_variables()[0]);
    return gradients;
  }
};

at::Tensor passes(const at::Tensor& parameter) {
  const c10::AutoGradMode records(true);  // later uses may need the gradient
  return Passes::apply(parameter);
}

}  // namespace

// hand_over() says that it writes to the gradient, though it does not. So compilers keep it, and keep the gradient's memory until the
// graph ends.
TORCH_LIBRARY(fastddp, library) {
  library.def("passes(Tensor(a) parameter) -> Tensor(a)", {at::Tag::pt2_compliant_tag});
  library.def("hand_over(Tensor(a!) gradient, Tensor parameter) -> ()", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(fastddp, CompositeImplicitAutograd, library) {
  library.impl("passes", passes);
}
TORCH_LIBRARY_IMPL(fastddp, CompositeExplicitAutograd, library) {
  library.impl("hand_over", hand_over);
}

}  // namespace fastddp
