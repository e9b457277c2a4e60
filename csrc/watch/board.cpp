#include "watch/board.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <future>
#include <thread>

namespace fastddp {
namespace {
constexpr double kSeconds = 2.5;
constexpr double kSecondsOfARank = 1e-3;
constexpr char kSeparator = '\0';  // between a report for people and the same in JSON

// What `function` returns; none, if it raises or takes too long. In that case its own thread goes on with it until the process
// ends: a store whose host is stopped no longer answers, and a call to it cannot be cancelled.
template <typename Function>
auto within(double seconds, Function function) -> std::optional<decltype(function())> {
  std::packaged_task task(std::move(function));
  auto answer = task.get_future();
  std::thread(std::move(task)).detach();
  if (answer.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) return std::nullopt;
  try {
    return answer.get();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

template <typename Function>
auto Board::ask(double seconds, Function function) -> std::optional<decltype(function(std::declval<c10d::Store&>()))> {
  if (!answers_) return std::nullopt;
  auto answer = within(seconds, [store = store_, own = own_store_, function = std::move(function)] {
    const auto client = own ? own : store->clone();
    return std::make_pair(client, function(*client));
  });
  answers_ = answer.has_value();
  if (!answer) {
    own_store_.reset();
    return std::nullopt;
  }
  own_store_ = answer->first;
  return std::move(answer->second);
}

void Board::write(const Record& record) {
  put(std::to_string(record.rank), encode(record));
}

std::vector<Record> Board::read(const std::vector<int>& ranks) {
  using Texts = std::vector<std::vector<uint8_t>>;
  const auto seconds = kSeconds + static_cast<double>(ranks.size()) * kSecondsOfARank;
  const auto written = ask(seconds, [key = key_, ranks](c10d::Store& store) {
    std::vector<std::string> there;
    for (const auto rank : ranks) {
      if (store.check({key + "/" + std::to_string(rank)})) there.push_back(key + "/" + std::to_string(rank));
    }
    return there.empty() ? Texts{} : store.multiGet(there);
  });
  std::vector<Record> records;
  for (const auto& text : written.value_or(Texts{})) records.push_back(decode_record({text.begin(), text.end()}));
  return records;
}

std::optional<bool> Board::is_first(const std::string& for_what) {
  const auto count = ask(kSeconds, [key = key_ + "/" + for_what](c10d::Store& store) { return store.add(key, 1); });
  return count ? std::optional(*count == 1) : std::nullopt;
}

void Board::put(const std::string& what, const std::string& text) {
  ask(kSeconds, [key = key_ + "/" + what, text](c10d::Store& store) {
    store.set(key, text);
    return true;
  });
}

void Board::remove(const std::string& what) {
  ask(kSeconds, [key = key_ + "/" + what](c10d::Store& store) { return store.deleteKey(key); });
}

std::optional<std::string> Board::get(const std::string& what, double seconds) {
  using Text = std::optional<std::string>;
  const auto read = [key = key_ + "/" + what, seconds](c10d::Store& store) {
    if (store.check({key})) return Text(store.get_to_str(key));
    if (seconds <= 0) return Text();
    try {
      store.wait({key}, std::chrono::milliseconds(std::lround(seconds * 1e3)));
    } catch (const std::exception&) {  // nothing came; or no store, and the next call says so
      return Text();
    }
    return Text(store.get_to_str(key));
  };
  return ask(kSeconds + seconds, read).value_or(Text());
}

// The stack is in one rank's error. Without text, if nobody is to raise; without anything, if waiting helps.
void Board::publish(size_t window, const Report& report, bool ends) {
  const auto value = (ends ? report.text(/*with_stack=*/false) : "") + kSeparator + report.json();
  put("report/" + std::to_string(window), report.is_soft() ? "" : value);
}

std::optional<Board::Published> Board::published(size_t window) {
  const auto value = get("report/" + std::to_string(window), 0);
  if (!value) return std::nullopt;
  const auto end = std::min(value->find(kSeparator), value->size());
  return Published{value->substr(0, end), value->substr(std::min(end + 1, value->size()))};
}

}  // namespace fastddp
