// Calls that may never return.
#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

namespace fastddp {

// What `function` returns; none, if it raises or takes too long. Then a thread of its own goes on with it, and ends with the
// process: a store whose host is stopped answers no more, and a call of it cannot be called off.
template <typename Function>
auto within(double seconds, Function function) -> std::optional<decltype(function())> {
  auto promise = std::make_shared<std::promise<decltype(function())>>();
  auto answer = promise->get_future();
  std::thread([promise, function = std::move(function)] {
    try {
      promise->set_value(function());
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  if (answer.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) return std::nullopt;
  try {
    return answer.get();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace fastddp
