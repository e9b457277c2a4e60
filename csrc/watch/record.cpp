#include "watch/record.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace fastddp {
namespace {

constexpr size_t kMostMissing = 8;
constexpr int kVersion = 1;

const char* to_string(Record::Device device) {
  constexpr std::array names{"with_host", "waits", "computes"};
  return names.at(static_cast<size_t>(device));
}

std::string in_words(const std::vector<Snapshot::Collectives>& collectives) {
  std::string text;
  for (const auto& of : collectives) {
    text += text.empty() ? "" : ", ";
    text += (of.first == of.last ? "collective " : "collectives " + std::to_string(of.first) + " to ") +
            std::to_string(of.last) + (of.lane == 0 ? "" : " of lane " + std::to_string(of.lane + 1));
  }
  return text;
}

template <typename Enum>
Enum named(const std::string& name, Enum last) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    if (name == to_string(Enum(i))) return Enum(i);
  }
  throw std::invalid_argument("no record of a rank: " + name);
}

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

// The only list of fields: `visit(key, field)` writes or reads one.
template <typename Of, typename Visit>
void for_fields(Of& record, const Visit& visit) {
  visit("rank", record.rank);
  visit("ranks", record.ranks);
  visit("host", record.host);
  visit("pid", record.process.pid);
  visit("life", record.life);
  visit("written", record.written);
  visit("doing", record.doing);
  visit("seconds", record.seconds);
  visit("still", record.still);
  visit("user_code", record.runs_user_code);
  visit("ends", record.process_ends);
  visit("followed", record.fails_for_others);
  visit("error", record.error);
  visit("state", record.state);
  visit("windows", record.windows);
  visit("bucket", record.bucket);
  visit("buckets", record.buckets);
  visit("tick", record.tick);
  visit("finished", record.finished);
  visit("bytes", record.bytes);
  visit("collectives", record.collectives);
  visit("of_parameters", record.of_parameters);
  visit("sequence", record.sequence);
  visit("missing_count", record.missing_count);
  visit("missing", record.missing);
  visit("lacking", record.lacking);
  visit("last_parameter", record.last_parameter);
  visit("device", record.device);
  visit("other_model", record.other_model);
  visit("stack", record.stack);
  visit("stack_at", record.stack_at);
  visit("unanswered", record.unanswered);
  visit("moved", record.moved);
}

struct Writer {
  std::ostringstream& out;

  template <typename Field>
  void operator()(const char* key, const Field& field) const {
    if constexpr (requires { to_string(field); }) {
      write(key, std::string(to_string(field)));
    } else {
      write(key, field);
    }
  }

 private:
  void write(const char* key, const std::string& value) const { out << key << ' ' << one_line(value) << '\n'; }
  void write(const char* key, const std::vector<std::string>& values) const {
    for (const auto& value : values) write(key, value);
  }
  void write(const char* key, const std::vector<size_t>& numbers) const { write(key, ranges_of(numbers)); }
  template <typename Number>
  void write(const char* key, const std::optional<Number>& value) const {
    if (value) write(key, *value);
  }
  template <typename Number>
  void write(const char* key, Number value) const {
    write(key, std::to_string(value));
  }
};

struct Reader {
  const std::string& key;
  const std::string& value;

  template <typename Field>
  void operator()(const char* of, Field& field) const {
    if (key == of) read(field);
  }

 private:
  void read(std::string& field) const { field = value; }
  void read(Life& field) const { field = named(value, Life::unknown); }
  void read(What& field) const { field = named(value, What::agree); }
  void read(WindowState& field) const { field = named(value, WindowState::failed); }
  void read(Record::Device& field) const { field = named(value, Record::Device::computes); }
  void read(std::vector<std::string>& field) const { field.push_back(value); }
  void read(std::vector<size_t>& field) const { field = numbers_in(value); }
  template <typename Number>
  void read(std::optional<Number>& field) const {
    read(field.emplace());
  }
  template <typename Number>
  void read(Number& field) const {
    field = static_cast<Number>(std::stod(value));
  }
};

}  // namespace

int64_t ms_since_1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

std::string ranges_of(const std::vector<size_t>& numbers) {
  std::string text;
  for (auto first = numbers.begin(); first != numbers.end();) {
    auto last = first;
    while (std::next(last) != numbers.end() && *std::next(last) == *last + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(*first) + (last == first ? "" : "-" + std::to_string(*last));
    first = std::next(last);
  }
  return text;
}

std::vector<size_t> numbers_in(const std::string& ranges) {
  std::vector<size_t> numbers;
  std::istringstream all(ranges);
  for (std::string range; std::getline(all, range, ',');) {
    const auto last = std::stoul(range.substr(range.find('-') + 1));
    for (auto number = std::stoul(range); number <= last; ++number) numbers.push_back(number);
  }
  return numbers;
}

bool Record::waits() const {
  if (!other_model.empty()) return true;
  if (device != Device::with_host) return device == Device::waits;
  return doing == What::finish || doing == What::closing || doing == What::gather || doing == What::agree ||
         (doing == What::tick && !runs_user_code);
}

Record record_of(const Snapshot& snapshot, Life life, double still) {
  Record record;
  static_cast<OfProcess&>(record) = snapshot;
  static_cast<Position&>(record) = snapshot;
  record.life = life;
  record.written = ms_since_1970();
  record.still = still;
  record.state = WindowState(std::min(snapshot.state, static_cast<uint32_t>(WindowState::failed)));
  record.of_parameters = snapshot.doing == What::gather;
  if (snapshot.doing != What::tick && snapshot.doing != What::finish && !record.of_parameters) record.bucket.reset();
  if (snapshot.device_wait) {
    record.device = snapshot.device_wait->has_begun ? Record::Device::waits : Record::Device::computes;
    record.bucket = snapshot.device_wait->bucket;
    record.of_parameters = snapshot.device_wait->of_parameters;
    record.windows = snapshot.device_wait->window - 1;
    record.seconds = snapshot.device_seconds;
  }
  record.buckets = snapshot.buckets.size();
  if (record.bucket && *record.bucket < snapshot.buckets.size() && !record.of_parameters) {
    record.bytes = snapshot.buckets[*record.bucket].bytes;
    record.collectives = in_words(snapshot.buckets[*record.bucket].collectives);
  }
  const auto missing = snapshot.missing(snapshot.tick);
  record.missing_count = missing.size();
  // Gradients come from the last layer to the first, so the last of these should come next.
  for (size_t i = missing.size(); i > 0 && record.missing.size() < kMostMissing; --i) {
    record.missing.push_back(snapshot.names[missing[i - 1]]);
  }
  if (!snapshot.device_wait) record.lacking = snapshot.missing();  // a window that the device is in has all gradients
  if (snapshot.last_parameter) record.last_parameter = snapshot.names[*snapshot.last_parameter];
  return record;
}

std::string bucket_in_words(const Record& record) {
  return (record.of_parameters ? "the parameters of bucket " : "bucket ") + std::to_string(record.bucket.value_or(0));
}

std::string encode(const Record& record) {
  std::ostringstream out;
  out << "fastddp " << kVersion << '\n';
  for_fields(record, Writer{out});
  return out.str();
}

Record decode_record(const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  if (line != "fastddp " + std::to_string(kVersion)) throw std::invalid_argument("no record of a rank: " + line);
  Record record;
  while (std::getline(lines, line)) {
    const auto space = std::min(line.find(' '), line.size());
    const auto key = line.substr(0, space);
    const auto value = line.substr(std::min(space + 1, line.size()));
    for_fields(record, Reader{key, value});
  }
  return record;
}

}  // namespace fastddp
