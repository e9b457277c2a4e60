// Bindings only.
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include "kernels.h"
#include "reducer.h"

namespace py = pybind11;
using namespace fastddp;

namespace {

std::vector<Slot> slots(const std::vector<std::optional<at::Tensor>>& gradients, const std::vector<at::Tensor>& views) {
  TORCH_CHECK_VALUE(gradients.size() == views.size(), "fastddp: ", gradients.size(), " gradients for ", views.size(),
                    " views");
  std::vector<Slot> result;
  for (size_t i = 0; i < views.size(); ++i) result.push_back({gradients[i].value_or(at::Tensor()), views[i]});
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  m.def(
      "pack",
      [](const std::vector<std::optional<at::Tensor>>& gradients, const std::vector<at::Tensor>& views, double scale) {
        if (!views.empty()) kernels_for(views.front().device()).pack(slots(gradients, views), scale);
      },
      py::arg("gradients"), py::arg("views"), py::arg("scale") = 1.0, no_gil,
      "view = cast(gradient * scale) for each pair; zeros where the gradient is None.");
  m.def(
      "unpack",
      [](const std::vector<std::optional<at::Tensor>>& gradients, const std::vector<at::Tensor>& views) {
        if (!views.empty()) kernels_for(views.front().device()).unpack(slots(gradients, views));
      },
      py::arg("gradients"), py::arg("views"), no_gil, "gradient = cast(view) for each pair.");

  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init<std::vector<at::Tensor>, std::vector<std::string>, std::vector<std::vector<size_t>>,
                    c10::intrusive_ptr<c10d::ProcessGroup>, bool>(),
           py::arg("parameters"), py::arg("names"), py::arg("plan"), py::arg("process_group"),
           py::arg("gradient_as_bucket_view"), no_gil)
      .def("begin_forward", &Reducer::begin_forward, py::arg("grad_enabled"), no_gil)
      .def("arm", &Reducer::arm, no_gil)
      .def("check_complete", &Reducer::check_complete, no_gil)
      .def("arrival_order", &Reducer::arrival_order, no_gil)
      .def("set_plan", &Reducer::set_plan, py::arg("plan"), no_gil)
      .def("remove_hooks", &Reducer::remove_hooks, no_gil)
      .def(
          "set_all_reduce",
          [](Reducer& reducer, std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> lanes) {
            TORCH_CHECK_VALUE(!lanes.empty(), "fastddp: no process group to exchange gradients over");
            reducer.set_exchange(make_all_reduce(std::move(lanes)));
          },
          py::arg("lanes"), no_gil)
      .def(
          "set_python_hook",
          [](Reducer& reducer, py::object state, py::object hook) {
            auto exchange = make_python_hook(std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook)));
            const py::gil_scoped_release release;
            reducer.set_exchange(std::move(exchange));
          },
          py::arg("state"), py::arg("hook"))
      .def_property_readonly("state", [](const Reducer& reducer) { return to_string(reducer.state()); });
}
