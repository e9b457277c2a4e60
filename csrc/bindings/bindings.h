// What Python sees of each part. Bindings only.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>

#include "block8/kernels.h"

namespace fastddp {

namespace py = pybind11;

constexpr py::call_guard<py::gil_scoped_release> no_gil;

// The same function, which releases the GIL. For py::init: under `no_gil` pybind11 would note the new object in its tables without it.
template <typename Function>
auto without_gil(Function function) {
  return [&]<typename Made, typename... Arguments>(Made (Function::*)(Arguments...) const) {
    return [function = std::move(function)](Arguments... arguments) {
      const py::gil_scoped_release release;
      return function(std::forward<Arguments>(arguments)...);
    };
  }(&Function::operator());
}

using OptionalTensor = std::optional<at::Tensor>;

void bind_kernels(py::module_& m);
void bind_exchanges(py::module_& m);
void bind_watch(py::module_& m);

// The format of that name; raises ValueError.
Block8 block8_of(const std::string& number, int64_t block);

// `owner` may hold the last reference to a process group, whose destructor joins threads that may want the GIL.
template <typename Owner>
std::shared_ptr<Owner> destroyed_without_gil(std::unique_ptr<Owner> owner) {
  return {owner.release(), [](Owner* last) {
            std::optional<py::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete last;
          }};
}

}  // namespace fastddp
