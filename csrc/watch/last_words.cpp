#include "watch/last_words.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "watch/diagnosis.h"
#include "watch/stall_watch.h"
#include "window/window.h"

namespace fastddp {
namespace {

struct Speakers {
  std::mutex mutex;
  std::vector<StallWatch*> watches;
  std::terminate_handler before = nullptr;
};

// Note [Never destroyed], device/cuda_driver.cpp.
Speakers& speakers() {
  static auto* const all = new Speakers;
  return *all;
}

[[noreturn]] void say_last_words() {
  auto& [mutex, watches, before] = speakers();
  {
    const std::lock_guard lock(mutex);  // other threads that terminate wait here: one report is enough
    try {
      static_cast<void>(std::ranges::any_of(watches, [](StallWatch* watch) { return watch->name_who_differs(); }));
    } catch (const std::exception&) {  // the process ends anyway
    }
  }
  before();
  std::abort();
}

constexpr double kUntilAllStand = 2.0;  // seconds

// Nobody ends there in good order.
bool is_in_a_call(What doing) {
  return doing != What::nothing && doing != What::after_forward && doing != What::after_backward &&
         doing != What::after_optimizer;
}

}  // namespace

void speaks_last(StallWatch& watch) {
  auto& [mutex, watches, before] = speakers();
  const std::lock_guard lock(mutex);
  watches.push_back(&watch);
  if (before == nullptr) before = std::set_terminate(say_last_words);
}

void speaks_no_more(StallWatch& watch) {
  auto& [mutex, watches, before] = speakers();
  const std::lock_guard lock(mutex);
  std::erase(watches, &watch);
}

// The first rank to claim reports. Every rank that fails because of another one comes here before it ends, so the first one
// finds none of them among the ranks that have ended.
void StallWatch::name_who_has_ended() {
  if (getpid() != pid_) return;
  end_thread();  // the device must not be asked while the process ends
  if (found_.who_has_ended || progress_->read().state != static_cast<uint32_t>(WindowState::reducing)) return;
  write_record();  // for ranks that go on: they will find this one among those that have ended
  const auto report = find_who_has_ended();
  if (!report) return;
  if (board_.is_first("ended").value_or(true)) say(report->text());
  keep(*report, progress_->windows());
}

bool StallWatch::leaves_others() {
  if (getpid() != pid_) return false;
  node_.look();
  const auto own = progress_->read();
  const bool ends_in_a_call = is_in_a_call(own.doing);
  return std::ranges::any_of(node_.records(), [&](const Record& of) {
    const bool is_in_step = (of.doing >= What::forward && of.doing <= What::closing) || of.waits();
    const bool is_left = ends_in_a_call || (is_in_step && of.windows >= own.windows);
    return of.life != Life::gone && !of.process_ends && is_left;
  });
}

std::string StallWatch::who_has_ended(int looks) {
  if (getpid() != pid_) return "";
  const auto report = find_who_has_ended(looks);
  if (!report) return "";
  found_.who_has_ended = true;
  keep(*report, progress_->windows());
  return report->text();
}

std::optional<Report> StallWatch::find_who_has_ended(int looks) {
  const auto own = progress_->read();
  node_.look();
  std::vector<Record> ended;
  // We look again for a while: a rank that ends in good order closes its connections a moment before it is gone.
  for (int look = 0; ended.empty() && look < looks; ++look) {
    if (look > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (auto& record : node_.records()) {
      const bool has_ended = record.life == Life::gone || record.process_ends;
      if (has_ended && !record.has_raised()) ended.push_back(std::move(record));
    }
  }
  if (ended.empty()) return std::nullopt;
  auto records = ended;
  records.push_back(record_of(own, Life::runs, 0));  // which says how far the step is
  auto report = diagnose(records, 0);
  std::erase_if(report.findings, [](const Finding& finding) { return finding.cause != Cause::gone; });
  const auto& gone = report.findings.empty() ? std::vector<int>{} : report.findings.front().ranks;
  report.headline = "step " + std::to_string(own.windows + 1) + " has failed on rank " + std::to_string(progress_->rank()) +
                    ", because " + named(gone) + (gone.size() == 1 ? " is" : " are") + " gone.";
  return report;
}

// No rank goes on, so a rank's last record says what it does now. That includes ranks that have ended as this one will.
bool StallWatch::name_who_differs() {
  if (getpid() != pid_) return false;
  end_thread();
  node_.look();
  std::this_thread::sleep_for(std::chrono::duration<double>(kUntilAllStand));
  auto records = machine_records();
  std::erase_if(records, [](const Record& of) { return of.is_stale; });
  for (auto& record : records) {
    record.life = Life::runs;
    record.still = record.seconds;
    if (record.rank == progress_->rank() && !record.waits()) record.stack = settings_.stack_without_gil();
  }
  if (std::ranges::none_of(records, &Record::waits)) return false;
  auto report = diagnose(records, 0);
  report.headline = "step " + std::to_string(report.step) + " has failed on rank " + std::to_string(progress_->rank()) +
                    ": another rank has sent what this one does not expect.";
  say(report.text());
  keep(report, progress_->windows());
  return true;
}

std::string StallWatch::report_of_open_step() {
  if (getpid() != pid_) return "";
  end_thread();
  const auto step = progress_->read().windows + 1;
  if (const std::lock_guard lock(found_.mutex); found_.kept.first == step) return found_.kept.second;
  if (asked_.reported != step - 1) return "";
  return board_.published(step - 1).value_or(Board::Published{}).json;
}

}  // namespace fastddp
