#include "watch/who_has.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "window/window.h"

namespace fastddp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kFirstPause = 0.02, kLongestPause = 0.5;  // seconds between two looks
constexpr double kForTheAnswer = 1.0;                      // seconds that it may take to write down and to send

// None: the rank is on its way, so what it lacks says nothing.
std::optional<Lack> lack_of(const Record& record, size_t window) {
  if (record.windows != window || record.is_stale) return std::nullopt;
  const bool waits = record.waits() && (record.lacking.empty() || record.seconds >= kLongWait);
  if (!waits && record.state != WindowState::partial) return std::nullopt;
  return Lack{record.lacking, waits};
}

std::vector<int> silent_ranks(const Lacks& found, const Record& own) {
  std::vector<int> silent;
  for (int rank = 0; rank < own.ranks; ++rank) {
    if (rank != own.rank && !found.contains(rank)) silent.push_back(rank);
  }
  return silent;
}

}  // namespace

std::optional<Lacks> WhoHas::ask(const Record& own, double patience, const std::function<std::vector<Record>()>& on_machine) {
  board_.try_again();
  if (!answered_.empty()) {
    board_.remove(answered_ + "/asked");
    board_.remove(std::exchange(answered_, ""));
  }
  Lacks found;
  const auto look = [&] {
    for (const auto& records : {on_machine(), board_.read(silent_ranks(found, own))}) {
      for (const auto& record : records) {
        if (const auto lack = lack_of(record, own.windows)) found.insert_or_assign(record.rank, *lack);
      }
    }
  };
  board_.write(own);
  const auto key = "missing/" + std::to_string(own.windows);
  if (!board_.is_first(key + "/asked").value_or(true)) {
    if (const auto answer = board_.get(key, patience + kForTheAnswer)) found = decode_lacks(*answer);
    if (!found.contains(own.rank)) look();  // the first one to ask has died, or has asked long ago
  } else {
    const auto end = Clock::now() + std::chrono::duration<double>(patience);
    auto pause = kFirstPause;
    for (look(); !silent_ranks(found, own).empty() && board_.answers() && Clock::now() < end; look()) {
      std::this_thread::sleep_for(std::chrono::duration<double>(pause));
      pause = std::min(1.5 * pause, kLongestPause);
    }
    found[own.rank] = {own.lacking, false};
    board_.put(key, encode(found));
    answered_ = key;
  }
  found.erase(own.rank);
  if (!board_.answers()) return std::nullopt;
  return found;
}

std::string encode(const Lacks& lacks) {
  std::map<std::string, std::vector<size_t>> alike;  // ranks
  for (const auto& [rank, lack] : lacks) {
    alike[(lack.waits ? "+" : ":") + ranges_of(lack.parameters)].push_back(static_cast<size_t>(rank));
  }
  std::string text;
  for (const auto& [lack, ranks] : alike) text += ranges_of(ranks) + lack + ';';
  return text;
}

Lacks decode_lacks(const std::string& text) {
  Lacks lacks;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ';');) {
    const auto middle = entry.find_first_of("+:");
    const Lack lack{numbers_in(entry.substr(middle + 1)), entry[middle] == '+'};
    for (const auto rank : numbers_in(entry.substr(0, middle))) lacks[static_cast<int>(rank)] = lack;
  }
  return lacks;
}

}  // namespace fastddp
