#include "window/window.h"

#include <array>
#include <optional>
#include <stdexcept>
#include <string>

namespace fastddp {
namespace {

constexpr std::array kStates{"idle", "accumulating", "armed", "reducing", "partial", "finished", "failed"};
constexpr std::array kEvents{"forward", "arm",  "local_gradient", "reduce",      "lack",
                             "finish",  "fail", "repair",         "stand_aside", "miss"};

// The state that follows; none: the event cannot happen.
std::optional<WindowState> after(WindowState state, WindowEvent event) {
  using enum WindowState;
  constexpr std::optional<WindowState> none;
  using Row = std::array<std::optional<WindowState>, kEvents.size()>;
  // clang-format off
  static constexpr std::array<Row, kStates.size()> next{{
      // forward      arm       local_gradient reduce    lack     finish    fail    repair stand_aside miss
      {{ idle,         armed,    accumulating,  none,     none,    none,     failed, none,  idle, none }},  // idle
      {{ accumulating, armed,    accumulating,  none,     none,    none,     none,   none,  idle, none }},  // accumulating
      {{ armed,        armed,    armed,         reducing, none,    none,     failed, none,  idle, idle }},  // armed
      {{ reducing,     reducing, reducing,      none,     partial, finished, failed, none,  none, none }},  // reducing
      {{ none,         partial,  partial,       reducing, none,    none,     failed, none,  none, none }},  // partial
      {{ idle,         finished, accumulating,  reducing, none,    none,     failed, none,  idle, none }},  // finished
      {{ failed,       failed,   failed,        none,     none,    none,     none,   idle,  none, none }},  // failed
  }};
  // clang-format on
  return next[static_cast<size_t>(state)][static_cast<size_t>(event)];
}

}  // namespace

const char* to_string(WindowState state) {
  return kStates[static_cast<size_t>(state)];
}

Window::Window(size_t parameters, Expect expect) : parameters_(parameters) {
  set_expect(expect);
}

bool Window::may_begin() const {
  return after(state_, WindowEvent::reduce).has_value();
}

bool Window::apply(WindowEvent event) {
  const auto from = state_.load();
  const auto to = after(from, event);
  if (!to) {
    throw std::logic_error(std::string("fastddp: in a window that is ") + to_string(from) + " there is no event '" +
                           kEvents[static_cast<size_t>(event)] + "'");
  }
  const bool fails = event == WindowEvent::fail;
  if (fails) owes_ = is_open();
  const bool ends = event == WindowEvent::finish || event == WindowEvent::stand_aside || (fails && owes_);
  if (ends) ++ended_;
  const bool follows_finished = from == WindowState::finished && *to != from && !fails;
  const bool is_new = follows_finished || event == WindowEvent::repair || event == WindowEvent::stand_aside;
  if (is_new) forget_what_came();
  state_ = *to;
  return is_new;
}

void Window::forget_what_came() {
  for (auto& parameter : parameters_) {
    parameter.arrival = Arrival::none;
    parameter.hooks = 0;
  }
  count_missing();
}

void Window::set_buckets(const std::vector<std::vector<size_t>>& buckets) {
  missing_.assign(buckets.size(), 0);
  for (auto& parameter : parameters_) parameter.bucket = buckets.size();
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    for (const auto parameter : buckets[bucket]) parameters_[parameter].bucket = bucket;
  }
  count_missing();
}

void Window::set_expect(Expect expect) {
  expect_ = expect;
  learning_ = expect != Expect::all;
  knows_first_ = false;
  const auto used = expect == Expect::all ? Used::yes : Used::no;
  for (auto& parameter : parameters_) {
    parameter.expected = 1;
    parameter.learned = parameter.hooks = 0;
    parameter.used = parameter.ever_used = used;
  }
  count_missing();
}

std::vector<int64_t> Window::learned() const {
  std::vector<int64_t> numbers{static_cast<int64_t>(ended_), learning_, knows_first_};
  for (const auto& parameter : parameters_) {
    for (const auto number : {parameter.expected, parameter.learned}) numbers.push_back(number);
    for (const auto used : {parameter.used, parameter.ever_used}) numbers.push_back(static_cast<int64_t>(used));
  }
  numbers.insert(numbers.end(), arrival_order_.begin(), arrival_order_.end());
  return numbers;
}

void Window::go_on_from(const std::vector<int64_t>& learned) {
  constexpr size_t kFirst = 3, kOfEach = 4;
  if (learned.size() < kFirst + kOfEach * parameters_.size()) throw std::logic_error("fastddp: windows of another model");
  ended_ = static_cast<size_t>(learned[0]);
  learning_ = learned[1] != 0;
  knows_first_ = learned[2] != 0;
  auto number = learned.begin() + kFirst;
  for (auto& parameter : parameters_) {
    parameter.expected = static_cast<uint32_t>(*number++);
    parameter.learned = static_cast<uint32_t>(*number++);
    parameter.used = static_cast<Used>(*number++);
    parameter.ever_used = static_cast<Used>(*number++);
  }
  arrival_order_.assign(number, learned.end());
  count_missing();
}

void Window::count_missing() {
  std::ranges::fill(missing_, 0);
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const auto bucket = parameters_[parameter].bucket;
    if (bucket < missing_.size() && waits_for(parameter)) ++missing_[bucket];
  }
}

void Window::learn_from_others(const std::vector<Used>& used) {
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    auto& record = parameters_[parameter];
    record.used = used[parameter];
    record.ever_used = expect_ == Expect::as_first ? std::max(record.ever_used, record.used) : record.used;
    if (expect_ == Expect::as_first) record.learned += record.hooks;
  }
  if (expect_ == Expect::as_first) knows_first_ = true;
}

void Window::learn(const std::vector<Used>& used) {
  learn_from_others(used);
  if (expect_ != Expect::as_last) return;
  // If the number of hooks changes from window to window, we wait for the greatest: a gradient that we took for final too
  // early may have moved into a wire.
  for (auto& parameter : parameters_) {
    parameter.learned = std::max(parameter.learned, parameter.hooks);
    parameter.expected = parameter.hooks > 0 ? parameter.learned : 0;
  }
  learning_ = false;
}

}  // namespace fastddp
