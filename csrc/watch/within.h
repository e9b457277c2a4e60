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

// What `function` returns; none, if it raises or takes too long. In that case its own thread goes on with it until the process
// ends: a store whose host is stopped no longer answers, and a call to it cannot be cancelled.
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
