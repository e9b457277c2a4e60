// Operators that stand in compiled graphs: note [Handed over], autograd/grad_hooks.h.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <optional>

#include "reducer/other_reducers.h"
#include "reducer/reducer.h"

namespace fastddp {
namespace {

// By what hand_over() finds parameters, an int64 each, on the CPU. Autograd lets nobody read a saved tensor that was written to since,
// and a program may write to a parameter between the use of it and backward.
at::Tensor identities(at::TensorList parameters) {
  auto found = at::empty(static_cast<int64_t>(parameters.size()), at::kLong);
  auto* next = found.mutable_data_ptr<int64_t>();
  for (const auto& parameter : parameters) *next++ = reinterpret_cast<int64_t>(parameter.unsafeGetTensorImpl());
  return found;
}

void hand_over(const at::Tensor& gradient, const at::Tensor& identities, int64_t place) {
  if (!identities.is_cpu() || identities.scalar_type() != at::kLong || place >= identities.numel())
    return;  // hooks replace what is saved
  const auto [reducer, number] = OtherReducers::only_reducer_of(identities.const_data_ptr<int64_t>()[place]);
  if (!reducer) return;
  std::optional<pybind11::gil_scoped_release> without_gil;
  if (PyGILState_Check() != 0) without_gil.emplace();
  reducer->hand_over(number, gradient);
}

// The parameter. Its gradient goes through hand_over().
class Passes : public torch::autograd::Function<Passes> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& parameter,
                            const at::Tensor& identities, int64_t place) {
    context->save_for_backward({identities});
    context->saved_data["place"] = place;
    return parameter.view_as(parameter);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    static const auto operation = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("fastddp::hand_over", "")
                                      .typed<void(const at::Tensor&, const at::Tensor&, int64_t)>();
    if (gradients[0].defined()) {
      operation.call(gradients[0], context->get_saved_variables()[0], context->saved_data["place"].toInt());
    }
    return {gradients[0], {}, {}};
  }
};

at::Tensor passes(const at::Tensor& parameter, const at::Tensor& identities, int64_t place) {
  const c10::AutoGradMode records(true);  // later uses may need the gradient
  return Passes::apply(parameter, identities, place);
}

}  // namespace

// hand_over() says that it writes to the gradient, though it does not. So compilers keep it, and keep the gradient's memory until the
// graph ends.
TORCH_LIBRARY(fastddp, library) {
  library.def("identities(Tensor[] parameters) -> Tensor", {at::Tag::pt2_compliant_tag});
  library.def("passes(Tensor(a) parameter, Tensor identities, int place) -> Tensor(a)", {at::Tag::pt2_compliant_tag});
  library.def("hand_over(Tensor(a!) gradient, Tensor identities, int place) -> ()", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(fastddp, CompositeImplicitAutograd, library) {
  library.impl("passes", passes);
}
TORCH_LIBRARY_IMPL(fastddp, CompositeExplicitAutograd, library) {
  library.impl("identities", identities);
  library.impl("hand_over", hand_over);
}

}  // namespace fastddp
