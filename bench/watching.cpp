// For bench.watching: what is written to the page of progress in a step, and names for profilers, many in a row.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "observe/progress.h"
#include "observe/ranges.h"
#include "window/window.h"

namespace {
using fastddp::Moment;
using fastddp::What;
using fastddp::WindowState;

void state(fastddp::Progress& page, WindowState state, size_t ended) {
  page.window(static_cast<uint32_t>(state), ended);
}

void step(fastddp::Progress& page, const std::vector<std::vector<size_t>>& buckets, size_t number) {
  const auto happened = [&](What what, std::optional<size_t> bucket = {}) { page.happened(Moment::now(what, bucket)); };
  happened(What::forward);
  state(page, WindowState::armed, number);
  happened(What::after_forward);
  happened(What::backward);
  happened(What::window);
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    for (const auto parameter : buckets[bucket]) page.gradient(parameter);
    happened(What::ready, bucket);
    const fastddp::Progress::Wait wait(page, What::tick, bucket);
    for (const auto what : {What::starts, What::started}) {
      page.begun(number, {number});
      happened(what, bucket);
    }
  }
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    const fastddp::Progress::Wait wait(page, What::finish, bucket);
    happened(What::finished, bucket);
  }
  happened(What::after_backward);
  state(page, WindowState::finished, number + 1);
  happened(What::optimizer);
  happened(What::after_optimizer);
}

template <typename Function>
double nanoseconds_each(size_t count, const Function& function) {
  const auto begin = std::chrono::steady_clock::now();
  for (size_t number = 0; number < count; ++number) function(number);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / double(count);
}

double of_page(const std::vector<std::vector<size_t>>& buckets, size_t steps) {
  size_t parameters = 0;
  for (const auto& bucket : buckets) parameters += bucket.size();
  fastddp::Progress page(std::vector<std::string>(parameters, "parameter"), 0, 1);
  page.plan(buckets, std::vector<uint64_t>(buckets.size()));
  return nanoseconds_each(steps, [&](size_t number) { step(page, buckets, number); });
}

double of_gradients(size_t count) {
  const std::string parameter = "transformer.h.11.mlp.c_fc.weight";
  return nanoseconds_each(count, [&](size_t) { const fastddp::Range range("gradient", parameter, 3); });
}

double of_windows(size_t count) {
  fastddp::LongRange window("window");
  return nanoseconds_each(count, [&](size_t) {
    window.begin();
    window.end();
  });
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("of_page", &of_page);
  m.def("of_gradients", &of_gradients);
  m.def("of_windows", &of_windows);
}
