// Bindings only.
#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>

#include "bindings/bindings.h"
#include "device/cuda_driver.h"
#include "observe/ranges.h"
#include "reducer/reducer.h"

using namespace fastddp;

namespace {

// A context manager.
struct OpenRange {
  std::string name;
  std::optional<Range> range = {};
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_kernels(m);
  bind_exchanges(m);

  py::class_<OpenRange>(m, "Range", "with Range(name): what profilers show; csrc/observe/ranges.h.")
      .def(py::init<std::string>(), py::arg("name"))
      .def("__enter__", [](OpenRange& open) { open.range.emplace(open.name); })
      .def("__exit__", [](OpenRange& open, const py::args&) { open.range.reset(); });

  m.def("is_capturing", &is_capturing, py::arg("device"), "csrc/device/cuda_driver.h", no_gil);

  m.def("backward_raised", &OtherReducers::backward_raised, py::arg("roots"), "csrc/reducer/other_reducers.h.", no_gil);

  bind_watch(m);

  py::enum_<Expect>(m, "Expect", "Which gradients a window waits for; csrc/window/window.h.")
      .value("all", Expect::all)
      .value("as_last", Expect::as_last)
      .value("as_first", Expect::as_first);

  py::enum_<Weighting::Kind>(m, "Weighting", "What a rank's gradients count; csrc/transport/weighting.h.")
      .value("mean", Weighting::Kind::mean)
      .value("sum", Weighting::Kind::sum)
      .value("share", Weighting::Kind::share);

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
      .def_readonly("next", &StepTimes::next)
      .def_readonly("gather_before", &StepTimes::gather_before)
      .def_readonly("gather_after", &StepTimes::gather_after)
      .def_readonly("own", &StepTimes::own);
  py::class_<SampledStep, std::shared_ptr<SampledStep>>(m, "SampledStep", "csrc/observe/step_sampler.h.")
      .def_readonly("window", &SampledStep::window)
      .def("is_over", &SampledStep::is_over, no_gil)
      .def("times", &SampledStep::times, no_gil);

  py::class_<Reducer, std::shared_ptr<Reducer>> reducer(m, "Reducer");
  const auto def = [&](const char* name, const auto& call, const auto&... arguments) {
    reducer.def(name, call, arguments..., no_gil);
  };
  const auto property = [&](const char* name, const auto& call) {
    reducer.def_property_readonly(name, py::cpp_function(call, no_gil));
  };
  property("interruption", &Reducer::interruption);
  property("progress", [](Reducer& reducer) { return reducer.timeline()->progress(); });
  property("device_progress", [](Reducer& reducer) { return reducer.timeline()->device_progress(); });
  property("state", [](Reducer& reducer) { return to_string(reducer.state()); });
  def("main_gradients", [](Reducer& reducer) { return reducer.buckets()->main_gradients(); });
  def("begin_module", [](Reducer& reducer) { reducer.timeline()->happened(What::module); });
  def("end_forward", [](Reducer& reducer) { reducer.timeline()->happened(What::after_forward); });
  def("arrival_order", [](Reducer& reducer) { return reducer.window()->arrival_order(); });
  def("ready_times", [](Reducer& reducer) { return reducer.timeline()->ready_times().seconds(); });
  def("knows_usage", [](Reducer& reducer) { return reducer.window()->knows_first(); });
  def("used_parameters", [](Reducer& reducer) { return reducer.window()->ever_used(); });
  def("missing", [](Reducer& reducer) { return reducer.reduction()->missing(); });
  def("share_order", [](Reducer& reducer) { reducer.reduction()->share_order(); });
  def("forget_sums", [](Reducer& reducer) { reducer.reduction()->shared_sums().forget(); });
  def("never_averaged", [](Reducer& reducer) { return reducer.averaged()->never(); });
  def("averaged", [](Reducer& reducer) { return reducer.averaged()->by_last_window(); });
  def("local_sums", [](Reducer& reducer) { return reducer.local_gradients()->read(); });
  def("synchronised_not_finite", [](Reducer& reducer) { return reducer.local_gradients()->synchronised(); });
  def("own_gradients", [](Reducer& reducer) {
    std::vector<at::Tensor> gradients;
    const auto buckets = reducer.buckets();
    for (size_t parameter = 0; parameter < buckets->parameters().size(); ++parameter) {
      gradients.push_back(buckets->own_gradient(parameter));
    }
    return gradients;
  });
  def("take_not_finite", [](Reducer& reducer) {
    const auto noticed = reducer.local_gradients()->take_not_finite();
    return noticed ? std::optional(std::tuple(noticed->window, noticed->by_all, noticed->in_result)) : std::nullopt;
  });
  def(
      "on_averaged",
      [](Reducer& reducer, Averaged::Callback callback) {
        // Shared, because to copy a function of Python takes the GIL.
        const auto shared = std::make_shared<Averaged::Callback>(std::move(callback));
        reducer.averaged()->call([shared](const std::vector<size_t>& parameters) { (*shared)(parameters); });
      },
      py::arg("callback"));
  def(
      "sample_every",
      [](Reducer& reducer, size_t windows, size_t first) { reducer.timeline()->sampler().set_every(windows, first); },
      py::arg("windows"), py::arg("first"));
  def("sampled", [](Reducer& reducer) { return reducer.timeline()->sampler().last(); });
  def(
      "set_weighting", [](Reducer& reducer, Weighting::Kind kind, double share) { reducer.set_weighting({kind, share}); },
      py::arg("kind"), py::arg("share") = 0.0);
  def(
      "record_ready_times", [](Reducer& reducer, bool recording) { reducer.timeline()->ready_times().record(recording); },
      py::arg("recording"));
  def(
      "watch_local_gradients", [](Reducer& reducer, bool watching) { reducer.local_gradients()->watch(watching); },
      py::arg("watching"));
  def(
      "too_large", [](Reducer& reducer, size_t parameter) { return reducer.local_gradients()->too_large(parameter); },
      py::arg("parameter"));
  reducer
      .def(py::init(without_gil([](std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                   std::vector<std::vector<size_t>> plan, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                   bool gradient_as_bucket_view, Expect expect, std::vector<size_t> sparse,
                                   std::optional<c10::ScalarType> gradient_dtype, bool in_main_grad,
                                   bool lazy_bucket_allocation, const std::vector<int64_t>& learned) {
             auto made = destroyed_without_gil(std::make_unique<Reducer>(
                 std::move(parameters), std::move(names), std::move(plan), std::move(process_group),
                 GradientForm{gradient_as_bucket_view, gradient_dtype, in_main_grad, lazy_bucket_allocation}, expect,
                 std::move(sparse), learned));
             made->listen();
             return made;
           })),
           py::arg("parameters"), py::arg("names"), py::arg("plan"), py::arg("process_group"),
           py::arg("gradient_as_bucket_view"), py::arg("expect") = Expect::all, py::arg("sparse") = std::vector<size_t>(),
           py::arg("gradient_dtype") = std::nullopt, py::arg("in_main_grad") = false, py::arg("lazy_bucket_allocation") = false,
           py::arg("learned") = std::vector<int64_t>())
      .def("begin_forward", torch::wrap_pybind_function_no_gil(&Reducer::begin_forward), py::arg("grad_enabled"));
  py::class_<Lost>(m, "Lost", "A lost connection; csrc/reducer/reducer.h.")
      .def_readonly("window", &Lost::window)
      .def_readonly("bucket", &Lost::bucket)
      .def_readonly("what", &Lost::what);
  property("lost", [](Reducer& reducer) { return reducer.lost(); });
  def("leave", &Reducer::leave, py::arg("group_stays"));
  def(
      "on_lost",
      [](Reducer& reducer, std::function<void(const Lost&)> tell) {
        // Shared, because to copy a function of Python takes the GIL.
        const auto shared = std::make_shared<std::function<void(const Lost&)>>(std::move(tell));
        reducer.on_lost([shared](const Lost& lost) { (*shared)(lost); });
      },
      py::arg("tell"));
  def("learned", [](Reducer& reducer) { return reducer.window()->learned(); });
  def("arm", &Reducer::arm, py::arg("outputs") = std::vector<at::Tensor>());
  def("opens_by", &Reducer::opens_by, py::arg("open"));
  def("set_local", &Reducer::set_local, py::arg("is_local"));
  def("note_missed_step", &Reducer::note_missed_step);
  def("note_optimizer", &Reducer::note_optimizer, py::arg("begins"));
  def("note_loss_scale", &Reducer::note_loss_scale, py::arg("scale"));
  def("send_parameters", &Reducer::send_parameters, py::arg("gather"), py::arg("bucket"), py::arg("memory"));
  def("await_parameters", &Reducer::await_parameters, py::arg("gather"), py::arg("bucket"));
  def(
      "discard_step",
      [](Reducer& reducer, const std::optional<at::Tensor>& only_if) { reducer.discard_step(only_if.value_or(at::Tensor())); },
      py::arg("only_if") = py::none());
  def("give_up", &Reducer::give_up);
  def("repair_if_failed", &Reducer::repair_if_failed);
  def("shadow_window", &Reducer::shadow_window);
  def("ask_layers", &Reducer::ask_layers, py::arg("callback"));
  def("set_expect", &Reducer::set_expect, py::arg("expect"));
  def("set_model_number", &Reducer::set_model_number, py::arg("number"));
  def("fix_usage", &Reducer::fix_usage);
  def("parameters_without_hook", &Reducer::parameters_without_hook);
  def("handed_over", &Reducer::handed_over);
  def("steps_inside_backward", &Reducer::steps_inside_backward);
  def("remove_hooks", &Reducer::remove_hooks);
  def("windows", &Reducer::windows);
  def("measure", &Reducer::measure);
  def("set_way", &Reducer::set_way, py::arg("way"), py::arg("plan") = std::nullopt);
  def("use_memory", &Reducer::use_memory, py::arg("memory"));
  def("failure", &Reducer::failure);
}
