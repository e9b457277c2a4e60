// Bindings only.
#include <torch/csrc/utils/pybind.h>

#include "copies.h"
#include "driver.h"
#include "graph.h"
#include "guard.h"
#include "hooks.h"
#include "memory.h"
#include "process_group.h"
#include "twin.h"

namespace py = pybind11;
using namespace fake_cuda;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  auto& simulator = Simulator::get();

  py::enum_<Policy>(m, "Policy")
      .value("lazy", Policy::lazy)
      .value("others_first", Policy::others_first)
      .value("random", Policy::random)
      .value("in_order", Policy::in_order);

  m.def("install", [&](c10::DeviceIndex devices) {
    simulator.device_count = devices;
    install_hooks();
  });
  m.def("set_capability", &set_capability);
  py::enum_<Fault>(m, "Fault")
      .value("none", Fault::none)
      .value("bit", Fault::bit)
      .value("program", Fault::program)
      .value("launch", Fault::launch)
      .value("load", Fault::load);
  m.def("break_kernels", &break_kernels, py::arg("part_of_name"), py::arg("fault"));
  m.def("schedule", [&](Policy policy, uint64_t seed) { simulator.set_policy(policy, seed); }, no_gil);
  m.def("synchronize", [&] { simulator.wait_for_all("everything"); }, no_gil);
  m.def("drain", [&] { simulator.drain(); }, no_gil);
  m.def("forget_errors", [&] { simulator.forget_errors(); }, no_gil);
  m.def("break_device", [&] { simulator.is_broken = true; });
  m.def("forbid_waits", [&](bool forbidden) { simulator.forbid_waits(forbidden); }, no_gil);
  m.def("manual_seed", &manual_seed, no_gil);

  m.def("waits", [&] { return simulator.waits().size(); });
  m.def("wait_reasons", [&] { return simulator.waits(); });
  m.def("launches", [&] { return simulator.launches(); });
  m.def("history", [&] { return simulator.history(); });
  m.def("collectives", [&] { return simulator.collectives(); });
  m.def("chunks_by_element", &chunks_by_element);
  m.def("events", &events);
  m.def("copies", &uploads);
  m.def("copied_bytes", &uploaded_bytes);
  m.def("reset_records", [&] {
    simulator.reset_records();
    reset_uploads();
  });
  m.def("allocated_bytes", &allocated_bytes, no_gil);
  m.def("peak_bytes", &peak_bytes, no_gil);
  m.def("reset_peak", &reset_peak, no_gil);
  m.def("stream_handle", [&](c10::DeviceIndex device, int64_t id) {
    return id == 0 ? 0 : reinterpret_cast<uintptr_t>(&simulator.queue(device, id));
  });

  // Of the current stream; one at a time.
  const auto current = []() -> Queue& { return current_queue(current_device().index()); };
  static std::shared_ptr<Graph> captured;
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def("replay", [current](const Graph& graph) { graph.replay(current()); }, no_gil);
  m.def(
      "begin_capture",
      [current] {
        captured = std::make_shared<Graph>();
        captured->begin(current());
      },
      no_gil);
  m.def(
      "end_capture",
      [] {
        const auto graph = std::exchange(captured, nullptr);
        graph->end();
        return graph;
      },
      no_gil);

  m.def("offer_memory", &offer_memory);
  m.def("memory_asked_for", &memory_asked_for);
  m.def("make_backend", &make_backend, py::arg("inner"), py::arg("store"), py::arg("rank"), py::arg("size"),
        py::arg("name"), py::arg("host_waits"), no_gil);
}
