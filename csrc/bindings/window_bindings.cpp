// A window alone, for tests of its transitions.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "window/window.h"

namespace fastddp {

void bind_window(py::module_& m) {
  py::enum_<Expect>(m, "Expect", "Which gradients a window waits for; csrc/window/window.h.")
      .value("all", Expect::all)
      .value("as_last", Expect::as_last)
      .value("as_first", Expect::as_first);

  py::enum_<WindowState> states(m, "WindowState", "csrc/window/window.h.");
  for (int i = 0; i <= static_cast<int>(WindowState::failed); ++i)
    states.value(to_string(WindowState(i)), WindowState(i));

  py::enum_<WindowEvent> events(m, "WindowEvent", "csrc/window/window.h.");
  for (int i = 0; i <= static_cast<int>(WindowEvent::stand_aside); ++i)
    events.value(to_string(WindowEvent(i)), WindowEvent(i));

  py::enum_<Window::Hook>(m, "Hook", "What it means that a gradient's hook ran.")
      .value("more_to_come", Window::Hook::more_to_come)
      .value("last", Window::Hook::last)
      .value("unexpected", Window::Hook::unexpected)
      .value("too_many", Window::Hook::too_many);

  py::class_<Window>(m, "Window", "What a window expects and what has come, in numbers; csrc/window/window.h.")
      .def(py::init<size_t, Expect>(), py::arg("parameters"), py::arg("expect") = Expect::all)
      .def_property_readonly("state", &Window::state)
      .def_property_readonly("is_open", &Window::is_open)
      .def_property_readonly("ended", &Window::ended)
      .def_property_readonly("forwards", &Window::forwards)
      .def_property_readonly("owes", &Window::owes)
      .def_property_readonly("is_learning", &Window::is_learning)
      .def_property_readonly("ends_with_backward", &Window::ends_with_backward)
      .def_property_readonly("knows_first", &Window::knows_first)
      .def("apply", &Window::apply, py::arg("event"))
      .def("set_buckets", &Window::set_buckets, py::arg("buckets"))
      .def("set_expect", &Window::set_expect, py::arg("expect"))
      .def("waits_for", &Window::waits_for, py::arg("parameter"))
      .def("count_hook", &Window::count_hook, py::arg("parameter"))
      .def("count_down", &Window::count_down, py::arg("parameter"))
      .def("is_complete", &Window::is_complete, py::arg("bucket"))
      .def("not_final", &Window::not_final)
      .def("arrival_order", &Window::arrival_order)
      .def(
          "learn",
          [](Window& window, const std::vector<int>& used) {
            std::vector<Used> by_parameter;
            for (const auto of : used) by_parameter.push_back(Used(of));
            window.learn(by_parameter);
          },
          py::arg("used"))
      .def("ever_used", py::overload_cast<>(&Window::ever_used, py::const_))
      .def("fix_first", &Window::fix_first);
}

}  // namespace fastddp
