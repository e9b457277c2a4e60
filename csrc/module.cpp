// Bindings only.
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include "cuda_driver.h"
#include "kernels_gpu.h"
#include "power_sgd.h"
#include "reducer.h"

namespace py = pybind11;
using namespace fastddp;

namespace {

using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

std::vector<Slot> slots(const std::vector<std::optional<at::Tensor>>& gradients, const std::vector<at::Tensor>& views) {
  TORCH_CHECK_VALUE(gradients.size() == views.size(), "fastddp: ", gradients.size(), " gradients for ", views.size(),
                    " views");
  std::vector<Slot> result;
  for (size_t i = 0; i < views.size(); ++i) result.push_back({gradients[i].value_or(at::Tensor()), views[i]});
  return result;
}

using OptionalTensor = std::optional<at::Tensor>;
using Matrices = std::vector<std::pair<OptionalTensor, OptionalTensor>>;  // error, q

std::vector<PowerSgdMemory::Matrix> matrices(const Matrices& given) {
  std::vector<PowerSgdMemory::Matrix> result;
  for (const auto& [error, q] : given) result.push_back({error.value_or(at::Tensor()), q.value_or(at::Tensor())});
  return result;
}

using GivenMatrix = std::tuple<OptionalTensor, OptionalTensor, at::Tensor, at::Tensor>;  // gradient, memory, p, q

std::vector<LowRankMatrix> low_rank_matrices(const std::vector<GivenMatrix>& given) {
  std::vector<LowRankMatrix> result;
  for (const auto& [gradient, memory, p, q] : given) {
    result.push_back({gradient.value_or(at::Tensor()), memory.value_or(at::Tensor()), p, q});
  }
  return result;
}

// The reducer may hold the last reference to the process group, whose destructor joins threads that may want the GIL.
struct DestroyWithoutGil {
  void operator()(Reducer* reducer) const {
    std::optional<py::gil_scoped_release> release;
    if (PyGILState_Check() != 0) release.emplace();
    delete reducer;
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<Kernels>(m, "Kernels", "Moves gradients to a wire and back, as the reducer does for one bucket.")
      .def(py::init([](c10::Device device) { return make_kernels(device); }), py::arg("device"))
      .def(
          "pack",
          [](Kernels& kernels, const std::vector<std::optional<at::Tensor>>& gradients,
             const std::vector<at::Tensor>& views, double scale) { kernels.pack(slots(gradients, views), scale); },
          py::arg("gradients"), py::arg("views"), py::arg("scale") = 1.0, no_gil,
          "view = cast(gradient * scale) for each pair; zeros where the gradient is None.")
      .def(
          "unpack",
          [](Kernels& kernels, const std::vector<std::optional<at::Tensor>>& gradients,
             const std::vector<at::Tensor>& views,
             bool measuring) { return kernels.unpack(slots(gradients, views), measuring); },
          py::arg("gradients"), py::arg("views"), py::arg("measuring") = false, no_gil,
          "gradient = cast(view) for each pair; returns what measure() would, if asked and able.")
      .def(
          "measure", [](Kernels& kernels, const at::Tensor& wire) { return add_up(kernels.measure(wire)); },
          py::arg("wire"), no_gil, "fp64 pair: the sum of squares, and the number of elements that are not finite.")
      .def_property_readonly("launches", &Kernels::launches, "Kernels launched up to now.")
      .def_property_readonly("uploads", &Kernels::uploads, "Tables sent to the device up to now.");

  py::class_<LowRankKernels>(m, "LowRankKernels", "PowerSGD's kernels, over (gradient, memory, p, q); csrc/low_rank.h.")
      .def(py::init([](const std::string& name) {
             TORCH_CHECK_VALUE(name == "cpu" || name == "aten", "fastddp: kernels are 'cpu' or 'aten', not '", name,
                               "'");
             return name == "cpu" ? make_cpu_low_rank_kernels() : make_aten_low_rank_kernels();
           }),
           py::arg("name"))
      .def(
          "compress",
          [](LowRankKernels& kernels, const std::vector<GivenMatrix>& matrices, double scale) {
            kernels.compress(low_rank_matrices(matrices), scale);
          },
          py::arg("matrices"), py::arg("scale") = 1.0, no_gil)
      .def(
          "project",
          [](LowRankKernels& kernels, const std::vector<GivenMatrix>& matrices, double scale) {
            kernels.project(low_rank_matrices(matrices), scale);
          },
          py::arg("matrices"), py::arg("scale") = 1.0, no_gil)
      .def(
          "reconstruct",
          [](LowRankKernels& kernels, const std::vector<GivenMatrix>& matrices, const at::Tensor& norm) {
            kernels.reconstruct(low_rank_matrices(matrices), norm);
          },
          py::arg("matrices"), py::arg("norm"), no_gil)
      .def(
          "orthogonalise",
          [](LowRankKernels& kernels, const std::vector<std::tuple<at::Tensor, bool, uint64_t>>& bases,
             double epsilon) {
            std::vector<Basis> all;
            for (const auto& [vectors, refill, seed] : bases) all.push_back({vectors, refill, seed});
            kernels.orthogonalise(all, epsilon);
          },
          py::arg("bases"), py::arg("epsilon") = 0.0, no_gil);

  py::enum_<Form>(m, "Form").value("pack", Form::pack).value("unpack", Form::unpack);
  m.def(
      "capability",
      [](c10::Device device) -> std::optional<int> {
        const auto* driver = CudaDriver::of(device.type());
        return driver == nullptr ? std::nullopt : std::optional(driver->capability(device));
      },
      py::arg("device"), no_gil, "Compute capability without the dot; None where there is no CUDA driver.");
  m.def("has_kernel", &has_kernel, py::arg("device"), py::arg("form"), py::arg("gradient"), py::arg("wire"), no_gil);
  m.def(
      "load_kernel",
      [](c10::Device device, Form form, c10::ScalarType gradient, c10::ScalarType wire, std::string name,
         const py::bytes& cubin, unsigned warps, unsigned shared_bytes, int64_t chunk_elements, size_t scratch) {
        const CompiledKernel kernel{std::move(name), cubin, warps, shared_bytes, chunk_elements, scratch};
        const py::gil_scoped_release release;
        load_kernel(device, form, gradient, wire, kernel);
      },
      py::arg("device"), py::arg("form"), py::arg("gradient"), py::arg("wire"), py::arg("name"), py::arg("cubin"),
      py::arg("warps"), py::arg("shared_bytes"), py::arg("chunk_elements"), py::arg("scratch_parameters"));
  m.def(
      "use_driver",
      [](const c10::Device& device, const std::string& library) { CudaDriver::use(device.type(), library); },
      py::arg("device"), py::arg("library"), no_gil, "Make a library the CUDA driver of a kind of device.");

  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names,
                       std::vector<std::vector<size_t>> plan, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                       bool gradient_as_bucket_view) {
             auto* reducer = new Reducer(std::move(parameters), std::move(names), std::move(plan),
                                         std::move(process_group), gradient_as_bucket_view);
             return std::shared_ptr<Reducer>(reducer, DestroyWithoutGil{});
           }),
           py::arg("parameters"), py::arg("names"), py::arg("plan"), py::arg("process_group"),
           py::arg("gradient_as_bucket_view"), no_gil)
      .def("begin_forward", &Reducer::begin_forward, py::arg("grad_enabled"), no_gil)
      .def("arm", &Reducer::arm, no_gil)
      .def("check_complete", &Reducer::check_complete, no_gil)
      .def("arrival_order", &Reducer::arrival_order, no_gil)
      .def("set_plan", &Reducer::set_plan, py::arg("plan"), no_gil)
      .def("remove_hooks", &Reducer::remove_hooks, no_gil)
      .def("windows", &Reducer::windows, no_gil)
      .def("measure", &Reducer::measure, no_gil)
      .def(
          "set_all_reduce",
          [](Reducer& reducer, Groups lanes, std::optional<c10::ScalarType> wire, bool divide_in_collective) {
            reducer.set_exchange(make_all_reduce(Lanes(std::move(lanes)), wire, divide_in_collective));
          },
          py::arg("lanes"), py::arg("wire") = py::none(), py::arg("divide_in_collective") = false, no_gil)
      .def(
          "set_wide_sum",
          [](Reducer& reducer, Groups lanes, c10::ScalarType wire) {
            reducer.set_exchange(make_wide_sum(Lanes(std::move(lanes)), wire));
          },
          py::arg("lanes"), py::arg("wire"), no_gil)
      .def(
          "set_power_sgd",
          [](Reducer& reducer, Groups lanes, Matrices of_parameters, Matrices of_buckets, bool error_feedback,
             bool warm_start, double epsilon, uint64_t seed, uint64_t first_window,
             std::optional<c10::ScalarType> wire) {
            const PowerSgdOptions options{error_feedback, warm_start, !of_buckets.empty(), epsilon, seed,
                                          first_window,   wire};
            PowerSgdMemory memory{matrices(of_parameters), matrices(of_buckets)};
            reducer.set_exchange(make_power_sgd(Lanes(std::move(lanes)), options, std::move(memory)));
          },
          py::arg("lanes"), py::arg("of_parameters"), py::arg("of_buckets"), py::kw_only(), py::arg("error_feedback"),
          py::arg("warm_start"), py::arg("epsilon"), py::arg("seed"), py::arg("first_window"), py::arg("wire"), no_gil)
      .def(
          "set_noop", [](Reducer& reducer) { reducer.set_exchange(make_noop()); }, no_gil)
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
