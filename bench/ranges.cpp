// For bench.ranges: the ranges of csrc/, many in a row.
#include <torch/extension.h>

#include <chrono>

#include "observe/ranges.h"

namespace {

template <typename Function>
double ns_each(size_t count, const Function& function) {
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i = 0; i < count; ++i) function();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / count;
}

double of_gradients(size_t count) {
  const std::string parameter = "transformer.h.11.mlp.c_fc.weight";
  return ns_each(count, [&] { const fastddp::Range range("gradient", parameter, 3); });
}

double of_windows(size_t count) {
  fastddp::Span span("window");
  return ns_each(count, [&] {
    span.begin();
    span.end();
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("of_gradients", &of_gradients);
  m.def("of_windows", &of_windows);
}
