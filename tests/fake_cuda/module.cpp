// What Python can call, as fake_cuda.<name>.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "module.h"
#include "twin.h"

namespace py = pybind11;
using namespace fake_cuda;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  auto& simulator = Simulator::get();

  m.def("make_device", &install_hooks);
  m.def("set_capability", &set_capability);
  m.def("make_backend", &make_backend, no_gil);

  // The order in which work runs. Starts afresh: what is pending runs, errors and records are forgotten.
  m.def(
      "schedule",
      [&](const std::string& policy, uint64_t seed) {
        static const std::map<std::string, Policy> policies{{"lazy", Policy::lazy},
                                                            {"others_first", Policy::others_first},
                                                            {"random", Policy::random},
                                                            {"in_order", Policy::in_order}};
        simulator.restart(policies.at(policy), seed);
      },
      py::arg("policy") = "lazy", py::arg("seed") = 0, no_gil);
  m.def("synchronize", [&] { simulator.wait_for_device(std::nullopt, "everything"); }, no_gil);
  m.def("forbid_waits", [&](bool forbidden) { simulator.waits_forbidden = forbidden; });
  // Until schedule(), each question about the device raises, as after an illegal access.
  m.def("break_device", [&] { simulator.failed_with = 700; });
  m.def("break_kernels", &break_kernels);

  // Since the last reset of records: what the host has waited for, in words, and how often; kernels that were launched; all
  // that ran, in this order; collectives that ran; copies from the host to the device.
  const auto record = [&](const char* name, auto get) {
    m.def(name, [&simulator, get] { return simulator.with_records(get); });
  };
  record("host_waits", [](const Records& records) { return records.waits; });
  record("waits", [](const Records& records) { return records.waits.size(); });
  record("launches", [](const Records& records) { return records.launches; });
  record("history", [](const Records& records) { return records.history; });
  record("collectives", [](const Records& records) { return records.collectives; });
  record("uploads", [](const Records& records) { return records.uploads; });
  m.attr("copies") = m.attr("uploads");
  record("reset_records", [](Records& records) { records = {}; });
  // So far: events that were made, and times that one was recorded that knows its time; chunks that pack and unpack have
  // moved element by element.
  m.def("events", &events);
  m.def("chunks_by_element", [] { return chunks_by_element.load(); });

  m.def("allocated_bytes", [] { return allocated_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = allocated_bytes.load(); });
  // Whether backends offer memory of their own, as NCCL's does (at first none does); what they were asked for since then:
  // addresses and bytes, in order.
  m.def("offer_memory", &offer_memory);
  m.def("memory_asked_for", &memory_asked_for);

  // Of the current stream; one at a time.
  const auto current = []() -> Queue& { return current_queue(current_device().index()); };
  static std::shared_ptr<Graph> captured;
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def("replay", [current](const Graph& graph) { graph.replay(current()); }, no_gil);
  m.def("begin_capture", [current] { captured = std::make_shared<Graph>(current()); }, no_gil);
  m.def(
      "end_capture",
      [] {
        const auto graph = std::exchange(captured, nullptr);
        graph->end();
        return graph;
      },
      no_gil);
}
