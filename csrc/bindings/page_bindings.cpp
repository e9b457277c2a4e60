// fastddp._pages: the pages of ranks, for tools that do not import torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "pages/shared_page.h"
#include "pages/snapshot.h"
#include "window/window.h"

namespace py = pybind11;
using namespace fastddp;

PYBIND11_MODULE(_pages, m) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::class_<Snapshot::Collectives>(m, "BucketCollectives", "By c10d's numbers.")
      .def_readonly("lane", &Snapshot::Collectives::lane)
      .def_readonly("first", &Snapshot::Collectives::first)
      .def_readonly("last", &Snapshot::Collectives::last);

  py::class_<Snapshot::OfBucket>(m, "BucketProgress", "started: seconds ago; None: not yet in this window.")
      .def_readonly("started", &Snapshot::OfBucket::started)
      .def_readonly("bytes", &Snapshot::OfBucket::bytes)
      .def_readonly("collectives", &Snapshot::OfBucket::collectives)
      .def_readonly("members", &Snapshot::OfBucket::members);

  py::class_<Snapshot>(m, "Snapshot", "What a rank is doing, at one moment; csrc/pages/snapshot.h.")
      .def_property_readonly("pid", [](const Snapshot& of) { return of.process.pid; })
      .def_property_readonly("start", [](const Snapshot& of) { return of.process.start; })
      .def_property_readonly("life", [](const Snapshot& of) { return to_string(life_of(of.process)); })
      .def_readonly("host", &Snapshot::host)
      .def_readonly("number", &Snapshot::number)
      .def_readonly("rank", &Snapshot::rank)
      .def_readonly("ranks", &Snapshot::ranks)
      .def_readonly("job", &Snapshot::job)
      .def_readonly("generation", &Snapshot::generation)
      .def_readonly("script", &Snapshot::script)
      .def_readonly("names", &Snapshot::names)
      .def_property_readonly("doing", [](const Snapshot& of) { return to_string(of.doing); })
      .def_readonly("seconds", &Snapshot::seconds)
      .def_readonly("bucket", &Snapshot::bucket)
      .def_property_readonly("state",
                             [](const Snapshot& of) {
                               if (of.state > static_cast<uint32_t>(WindowState::failed)) {
                                 throw std::runtime_error("fastddp: no state of a window: " + std::to_string(of.state));
                               }
                               return to_string(WindowState(of.state));
                             })
      .def_readonly("windows", &Snapshot::windows)
      .def_readonly("tick", &Snapshot::tick)
      .def_readonly("finished", &Snapshot::finished)
      .def_readonly("gradients", &Snapshot::gradients)
      .def_readonly("last_parameter", &Snapshot::last_parameter)
      .def_readonly("sequence", &Snapshot::sequence)
      .def_readonly("runs_user_code", &Snapshot::runs_user_code)
      .def_readonly("process_ends", &Snapshot::process_ends)
      .def_readonly("error", &Snapshot::error)
      .def_readonly("buckets", &Snapshot::buckets)
      .def_readonly("came", &Snapshot::came)
      .def_readonly("step_seconds", &Snapshot::step_seconds)
      .def("missing", py::overload_cast<size_t>(&Snapshot::missing, py::const_), py::arg("bucket"));

  m.def("read_page", py::overload_cast<const std::string&>(&read_page), py::arg("path"), no_gil);
  m.def("life_of_owner", [](const std::string& path) { return to_string(life_of_owner(path)); }, py::arg("path"), no_gil);
  m.def("shared_pages", &shared_pages, py::arg("pid") = 0, no_gil);
  m.def("remove_left_pages", &remove_left_pages, no_gil);
  m.def("remove_page", &remove_page, py::arg("path"), no_gil);
}
