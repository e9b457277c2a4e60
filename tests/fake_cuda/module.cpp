// Bindings only.
#include <torch/csrc/utils/pybind.h>

#include "guard.h"
#include "memory.h"
#include "process_group.h"

namespace py = pybind11;
using namespace fake_cuda;

namespace fake_cuda {
void install_hooks();
void set_capability(int capability);
}  // namespace fake_cuda

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  auto& simulator = Simulator::get();

  py::enum_<Policy>(m, "Policy")
      .value("lazy", Policy::lazy)
      .value("others_first", Policy::others_first)
      .value("random", Policy::random);

  m.def("install", [](c10::DeviceIndex devices) {
    Simulator::get().device_count = devices;
    install_hooks();
  });
  m.def("set_capability", &set_capability);
  m.def("schedule", [&](Policy policy, uint64_t seed) { simulator.set_policy(policy, seed); }, no_gil);
  m.def("synchronize", [&] { simulator.wait_for_everything("synchronize()"); }, no_gil);
  m.def("drain", [&] { simulator.drain(); }, no_gil);
  m.def("forbid_waits", [&](bool forbidden) { simulator.forbid_waits(forbidden); }, no_gil);
  m.def("waits", [&] { return simulator.waits; });
  m.def("copies", [&] { return simulator.copies; });
  m.def("collectives", [&] { return simulator.collectives; });
  m.def("launches", [&] { return simulator.launches; });
  const auto current = []() -> Queue& { return current_queue(current_device().index()); };
  py::class_<Graph>(m, "Graph")
      .def("replay", [&, current](const Graph& graph) { simulator.replay(graph, current()); }, no_gil);
  m.def("begin_capture", [&, current] { simulator.begin_capture(current()); }, no_gil);
  m.def("end_capture", [&] { return simulator.end_capture(); }, no_gil);

  m.def("allocated_bytes", &allocated_bytes);
  m.def("peak_bytes", &peak_bytes);
  m.def("reset_peak", &reset_peak);

  m.def("make_backend", &make_backend, py::arg("inner"), py::arg("rank"), py::arg("size"), no_gil);
}
