#include "watch/board.h"

#include <algorithm>
#include <cstdint>

#include "watch/within.h"

namespace fastddp {
namespace {
constexpr double kSeconds = 2.5;
constexpr double kSecondsOfARank = 1e-3;
constexpr char kSeparator = '\0';  // between a report for people and the same in JSON
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
  ask(kSeconds, [key = key_ + "/" + std::to_string(record.rank), text = encode(record)](c10d::Store& store) {
    store.set(key, text);
    return true;
  });
}

std::vector<Record> Board::read(int ranks) {
  using Texts = std::vector<std::vector<uint8_t>>;
  const auto written = ask(kSeconds + ranks * kSecondsOfARank, [key = key_, ranks](c10d::Store& store) {
    std::vector<std::string> there;
    for (int rank = 0; rank < ranks; ++rank) {
      if (store.check({key + "/" + std::to_string(rank)})) there.push_back(key + "/" + std::to_string(rank));
    }
    return there.empty() ? Texts{} : store.multiGet(there);
  });
  const auto now = ms_since_1970();
  std::vector<Record> records;
  for (const auto& text : written.value_or(Texts{})) {
    auto record = decode_record({text.begin(), text.end()});
    if (static_cast<double>(now - record.written) * 1e-3 < kFreshRecord) records.push_back(std::move(record));
  }
  return records;
}

std::optional<bool> Board::is_first(const std::string& for_what) {
  const auto count = ask(kSeconds, [key = key_ + "/" + for_what](c10d::Store& store) { return store.add(key, 1); });
  return count ? std::optional(*count == 1) : std::nullopt;
}

// A soft report (waiting helps) is published as an empty value.
void Board::publish(size_t window, const Report& report) {
  ask(kSeconds, [key = key_of_report(window),
                 value = report.is_soft() ? "" : report.text() + kSeparator + report.json()](c10d::Store& store) {
    store.set(key, value);
    return true;
  });
}

std::optional<Board::Published> Board::published(size_t window) {
  using Value = std::optional<std::string>;
  const auto value = ask(kSeconds, [key = key_of_report(window)](c10d::Store& store) {
                       return store.check({key}) ? Value(store.get_to_str(key)) : Value();
                     }).value_or(Value());
  if (!value) return std::nullopt;
  const auto end = std::min(value->find(kSeparator), value->size());
  return Published{value->substr(0, end), value->substr(std::min(end + 1, value->size()))};
}

}  // namespace fastddp
