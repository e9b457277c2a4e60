// Bindings only.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include "codec/low_rank_tables.h"
#include "device/compiled_kernels.h"
#include "observe/ranges.h"
#include "pack/kernels.h"
#include "reducer/reducer.h"

namespace py = pybind11;
using namespace fastddp;

namespace fastddp {
void bind_window(py::module_& m);  // window.cpp
}

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

std::vector<LowRankMemory::Matrix> matrices(const Matrices& given) {
  std::vector<LowRankMemory::Matrix> result;
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

std::vector<Basis> numbered(const std::vector<at::Tensor>& vectors) {
  std::vector<Basis> bases;
  for (const auto& basis : vectors) bases.push_back({basis, bases.size()});
  return bases;
}

// A reference that may be dropped without the GIL.
std::shared_ptr<py::object> held(py::object object) {
  return {new py::object(std::move(object)), [](py::object* reference) {
            const py::gil_scoped_acquire acquire;
            delete reference;
          }};
}

// It may hold the last reference to a process group, whose destructor joins threads that may want the GIL.
template <typename Owner>
std::shared_ptr<Owner> destroyed_without_gil(std::unique_ptr<Owner> owner) {
  return {owner.release(), [](Owner* last) {
            std::optional<py::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete last;
          }};
}

// A context manager.
class OpenRange {
 public:
  explicit OpenRange(std::string name) : name_(std::move(name)) {}
  void enter() { range_.emplace(name_); }
  void exit(const py::args&) { range_.reset(); }

 private:
  std::string name_;
  std::optional<Range> range_;
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

  py::class_<LowRankKernels>(m, "LowRankKernels",
                             "PowerSGD's kernels, over (gradient, memory, p, q); csrc/codec/low_rank_kernels.h.")
      .def(py::init([](c10::Device device) { return make_low_rank_kernels(device); }), py::arg("device"))
      .def_static("of_operators", &make_aten_low_rank_kernels, "Those made of torch's operators.")
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
          [](LowRankKernels& kernels, const std::vector<GivenMatrix>& matrices) {
            return add_up(kernels.reconstruct(low_rank_matrices(matrices)));
          },
          py::arg("matrices"), no_gil)
      .def(
          "orthogonalise",
          [](LowRankKernels& kernels, const std::vector<at::Tensor>& bases, double epsilon,
             std::optional<uint64_t> refill) { kernels.orthogonalise(numbered(bases), epsilon, refill); },
          py::arg("bases"), py::arg("epsilon") = 0.0, py::arg("refill") = py::none(), no_gil)
      .def_property_readonly("launches", &LowRankKernels::launches, "Kernels launched up to now.")
      .def_property_readonly("uploads", &LowRankKernels::uploads, "Tables sent to the device up to now.");

  // The tables that the launcher makes, for tests of the kernels that read them.
  m.def(
      "low_rank_tables",
      [](const std::vector<GivenMatrix>& given, int64_t rows, int64_t columns, int64_t step, int64_t elements) {
        const auto all = low_rank_matrices(given);
        return std::map<std::string, Words>{{"matrices", matrix_words(all)},
                                            {"compress", compress_blocks(all, rows)},
                                            {"reconstruct", reconstruct_blocks(all, rows, columns)},
                                            {"project", project_blocks(all, step)},
                                            {"sums", sums(all, step, elements)},
                                            {"partials", {partial_numbers(all, step)}}};
      },
      py::arg("matrices"), py::arg("rows"), py::arg("columns"), py::arg("step"), py::arg("elements"), no_gil);
  m.def(
      "basis_tables",
      [](const std::vector<at::Tensor>& bases, int64_t lines) {
        return std::map<std::string, Words>{{"bases", basis_words(numbered(bases), lines)},
                                            {"blocks", basis_blocks(numbered(bases), lines)}};
      },
      py::arg("bases"), py::arg("lines"), no_gil);
  m.def(
      "capability",
      [](c10::Device device) -> std::optional<int> {
        const auto* driver = CudaDriver::of(device.type());
        return driver == nullptr ? std::nullopt : std::optional(driver->capability(device));
      },
      py::arg("device"), no_gil, "Compute capability without the dot; None where there is no CUDA driver.");
  m.def(
      "has_kernel", [](c10::Device device, const std::string& name) { return find_kernel(device, name) != nullptr; },
      py::arg("device"), py::arg("name"), no_gil);
  m.def(
      "load_kernel",
      [](c10::Device device, std::string name, const py::bytes& cubin, unsigned warps, unsigned shared_bytes,
         size_t parameters, size_t scratch, std::vector<int64_t> tile) {
        const CompiledKernel kernel{std::move(name), cubin, warps, shared_bytes, parameters, scratch, std::move(tile)};
        const py::gil_scoped_release release;
        load_kernel(device, kernel);
      },
      py::arg("device"), py::arg("name"), py::arg("cubin"), py::arg("warps"), py::arg("shared_bytes"),
      py::arg("parameters"), py::arg("scratch_parameters"), py::arg("tile"));
  m.def(
      "use_driver",
      [](const c10::Device& device, const std::string& library) { CudaDriver::use(device.type(), library); },
      py::arg("device"), py::arg("library"), no_gil, "Make a library the CUDA driver of a kind of device.");

  py::class_<OpenRange>(m, "Range", "with Range(name): what profilers show; csrc/observe/ranges.h.")
      .def(py::init<std::string>(), py::arg("name"))
      .def("__enter__", &OpenRange::enter)
      .def("__exit__", &OpenRange::exit);

  bind_window(m);

  py::enum_<Average::Kind>(m, "Average", "What a rank's gradients count; csrc/transport/average.h.")
      .value("mean", Average::Kind::mean)
      .value("sum", Average::Kind::sum)
      .value("share", Average::Kind::share);

  py::class_<StepTimes::OfBucket>(m, "BucketTimes")
      .def_readonly("ready", &StepTimes::OfBucket::ready)
      .def_readonly("start", &StepTimes::OfBucket::start)
      .def_readonly("end", &StepTimes::OfBucket::end);
  py::class_<StepTimes>(m, "StepTimes", "ms since the forward began; csrc/observe/step_sampler.h.")
      .def_readonly("buckets", &StepTimes::buckets)
      .def_readonly("computed", &StepTimes::computed)
      .def_readonly("blocked", &StepTimes::blocked)
      .def_readonly("rest_start", &StepTimes::rest_start)
      .def_readonly("rest_end", &StepTimes::rest_end)
      .def_readonly("end", &StepTimes::end)
      .def_readonly("next", &StepTimes::next);

  py::class_<WaitClock::Reading>(m, "Waiting")
      .def_readonly("window", &WaitClock::Reading::window)
      .def_readonly("complete", &WaitClock::Reading::complete)
      .def_readonly("seconds", &WaitClock::Reading::seconds);

  py::class_<WaitClock, std::shared_ptr<WaitClock>>(m, "WaitClock").def("read", &WaitClock::read);

  py::class_<Codec, std::shared_ptr<Codec>>(m, "Codec", "What travels in place of gradients; csrc/codec/codec.h.")
      .def_static(
          "cast", [](std::optional<c10::ScalarType> wire) { return std::shared_ptr(make_cast(wire)); },
          py::arg("wire") = py::none(), no_gil)
      .def_static(
          "low_rank",
          [](const Matrices& of_parameters, const Matrices& of_buckets, bool error_feedback, bool warm_start,
             double epsilon, uint64_t seed, uint64_t first_window, std::optional<c10::ScalarType> wire) {
            const LowRankOptions options{error_feedback, warm_start, !of_buckets.empty(), epsilon, seed,
                                         first_window,   wire};
            return std::shared_ptr(make_low_rank(options, {matrices(of_parameters), matrices(of_buckets)}));
          },
          py::arg("of_parameters"), py::arg("of_buckets"), py::kw_only(), py::arg("error_feedback"),
          py::arg("warm_start"), py::arg("epsilon"), py::arg("seed"), py::arg("first_window"), py::arg("wire"), no_gil);

  py::class_<Transport, std::shared_ptr<Transport>>(m, "Transport", "How wires travel; csrc/transport/transport.h.")
      .def_static(
          "all_reduce",
          [](Groups lanes, bool divides) {
            return destroyed_without_gil(make_all_reduce(Lanes(std::move(lanes)), divides));
          },
          py::arg("lanes"), py::arg("divides") = false, no_gil)
      .def_static(
          "sharded_sum",
          [](Groups lanes, const Nodes& nodes, c10::Device device) {
            return destroyed_without_gil(make_sharded_sum(Lanes(std::move(lanes)), nodes, device));
          },
          py::arg("lanes"), py::arg("nodes"), py::arg("device"), no_gil);

  py::class_<Exchange, std::shared_ptr<Exchange>>(m, "Exchange", "How gradients travel; csrc/pipeline/exchange.h.")
      .def_static(
          "pipeline",
          [](std::shared_ptr<Codec> codec, std::shared_ptr<Transport> transport) {
            return destroyed_without_gil(make_pipeline(std::move(codec), std::move(transport)));
          },
          py::arg("codec"), py::arg("transport"), no_gil)
      .def_static(
          "noop", [] { return destroyed_without_gil(make_noop()); }, no_gil)
      .def_static(
          "python_hook",
          [](py::object state, py::object hook, std::string name, c10::intrusive_ptr<c10d::ProcessGroup> group) {
            auto call = std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook));
            return destroyed_without_gil(make_python_hook(std::move(call), std::move(name), std::move(group)));
          },
          py::arg("state"), py::arg("hook"), py::arg("name"), py::arg("process_group"));

  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names,
                       std::vector<std::vector<size_t>> plan, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                       bool gradient_as_bucket_view, Expect expect, std::vector<size_t> sparse) {
             return destroyed_without_gil(std::make_unique<Reducer>(
                 std::move(parameters), std::move(names), std::move(plan), std::move(process_group),
                 gradient_as_bucket_view, expect, std::move(sparse)));
           }),
           py::arg("parameters"), py::arg("names"), py::arg("plan"), py::arg("process_group"),
           py::arg("gradient_as_bucket_view"), py::arg("expect") = Expect::all,
           py::arg("sparse") = std::vector<size_t>(), no_gil)
      .def("begin_forward", torch::wrap_pybind_function_no_gil([](Reducer& reducer, bool grad_enabled) {
             reducer.begin_forward(grad_enabled);
           }),
           py::arg("grad_enabled"))
      .def("arm", &Reducer::arm, py::arg("outputs") = std::vector<at::Tensor>(), no_gil)
      .def("missing", &Reducer::missing, no_gil)
      .def("give_up", &Reducer::give_up, no_gil)
      .def("shadow_window", &Reducer::shadow_window, no_gil)
      .def(
          "set_average", [](Reducer& reducer, Average::Kind kind, double share) { reducer.set_average({kind, share}); },
          py::arg("kind"), py::arg("share") = 0.0, no_gil)
      .def(
          "on_averaged",
          [](Reducer& reducer, py::object callback) {
            auto call = [callback = held(std::move(callback))](const std::vector<size_t>& parameters) {
              const py::gil_scoped_acquire acquire;
              (*callback)(parameters);
            };
            const py::gil_scoped_release release;
            reducer.on_averaged(std::move(call));
          },
          py::arg("callback"))
      .def_property_readonly(
          "wait_clock", py::cpp_function([](Reducer& reducer) { return reducer.observer()->wait_clock(); }, no_gil))
      .def(
          "arrival_order", [](Reducer& reducer) { return reducer.window()->arrival_order(); }, no_gil)
      .def(
          "take_ready_times", [](Reducer& reducer, bool taking) { reducer.observer()->ready_times().take(taking); },
          py::arg("taking"), no_gil)
      .def(
          "ready_times", [](Reducer& reducer) { return reducer.observer()->ready_times().seconds(); }, no_gil)
      .def("set_expect", &Reducer::set_expect, py::arg("expect"), no_gil)
      .def(
          "knows_usage", [](Reducer& reducer) { return reducer.window()->knows_first(); }, no_gil)
      .def(
          "used_parameters", [](Reducer& reducer) { return reducer.window()->ever_used(); }, no_gil)
      .def("share_order", &Reducer::share_order, no_gil)
      .def("fix_usage", &Reducer::fix_usage, no_gil)
      .def("set_plan", &Reducer::set_plan, py::arg("plan"), no_gil)
      .def("parameters_without_hook", &Reducer::parameters_without_hook, no_gil)
      .def("remove_hooks", &Reducer::remove_hooks, no_gil)
      .def("windows", &Reducer::windows, no_gil)
      .def("measure", &Reducer::measure, no_gil)
      .def(
          "sample_every", [](Reducer& reducer, size_t steps) { reducer.observer()->sampler().set_every(steps); },
          py::arg("steps"), no_gil)
      .def(
          "sampled", [](Reducer& reducer) { return reducer.observer()->sampler().last(); }, no_gil)
      .def("set_exchange", &Reducer::set_exchange, py::arg("exchange"), no_gil)
      .def("failure", &Reducer::failure, no_gil)
      .def_property_readonly("state", [](Reducer& reducer) {
        const py::gil_scoped_release release;
        return to_string(reducer.state());
      });
}
