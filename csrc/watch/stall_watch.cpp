#include "watch/stall_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <future>
#include <stdexcept>
#include <utility>

#include "window/window.h"

namespace fastddp {
namespace {

constexpr size_t kFirstSteps = 3;
constexpr double kForStore = 3.0;  // seconds
// Between the moment in which this rank is sure and that in which all others are: they look a few times a second.
constexpr double kForOthers = 1.0;
constexpr double kForGil = 0.8;  // the thread of Python's looks twice a second
constexpr double kFirstRewrite = 5.0, kLastRewrite = 20.0;
constexpr double kFresh = 2 * kLastRewrite + 5.0;

double seconds_since(std::chrono::steady_clock::time_point moment) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - moment).count();
}

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

// Of a rank that could tell it.
bool lacks_stack(const Report& report) {
  if (!report.stack.empty() || report.findings.empty()) return false;
  const auto cause = report.findings.front().cause;
  return cause >= Cause::outside && cause <= Cause::optimizer && cause != Cause::other_graph;
}

}  // namespace

template <typename Function>
auto StallWatch::ask_store(double seconds, Function function)
    -> std::optional<decltype(function(std::declval<c10d::Store&>()))> {
  if (!store_answers_) return std::nullopt;
  auto answer = within(seconds, [store = store_, own = own_store_, function = std::move(function)] {
    const auto client = own ? own : store->clone();
    return std::make_pair(client, function(*client));
  });
  store_answers_ = answer.has_value();
  if (!answer) {
    own_store_.reset();
    return std::nullopt;
  }
  own_store_ = answer->first;
  return std::move(answer->second);
}

StallWatch::StallWatch(std::shared_ptr<const Progress> progress, c10::intrusive_ptr<c10d::Store> store, std::string key,
                       uint64_t job, Settings settings)
    : progress_(std::move(progress)),
      store_(std::move(store)),
      key_(std::move(key)),
      settings_(settings),
      rank_(progress_->rank()),
      ranks_(progress_->ranks()),
      pid_(getpid()),
      node_(job, rank_),
      pulse_(progress_->pulse()),
      changed_(Clock::now()),
      window_ended_(changed_),
      thread_([this] { run(); }) {}

StallWatch::~StallWatch() {
  if (getpid() != pid_) {
    thread_.detach();  // a process that was forked has no such thread
    return;
  }
  end_thread();
}

void StallWatch::end_thread() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  ends_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StallWatch::run() {
  while (pause(std::min(0.25, settings_.patience / 8))) {
    try {
      look();
    } catch (const std::exception& error) {
      say(std::string("fastddp: what stands still cannot be found out: ") + error.what());
    }
  }
}

// Whether the watch goes on.
bool StallWatch::pause(double seconds) {
  std::unique_lock lock(mutex_);
  return !ends_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return is_over_; });
}

void StallWatch::look() {
  const auto now = progress_->pulse();
  if (now != pulse_) changed_ = Clock::now();
  if (now.windows != pulse_.windows) {
    window_ended_ = changed_;
    written_doing_.reset();
    rewrite_ = kFirstRewrite;
    store_answers_ = true;
    const std::lock_guard lock(mutex_);
    stack_.clear();  // it would be shown as one of this window
  }
  pulse_ = now;
  if (!knows_node_ && now.windows > 0) {
    node_.look();
    knows_node_ = true;
  }
  auto patience = std::max(settings_.patience, 5 * progress_->longest_step());
  if (now.windows < kFirstSteps) patience *= 3;  // ranks compile and warm up, and not all for as long
  if (seconds_since(window_ended_) < 0.8 * patience) return;
  const bool says_something_new =
      !written_doing_ || takes_new_stack() || (now.doing != *written_doing_ && seconds_since(written_) > 1);
  const bool is_old = seconds_since(written_) > rewrite_;
  if (is_old) rewrite_ = std::min(2 * rewrite_, kLastRewrite);
  if (says_something_new || is_old) write_record();
  if (wants_stack() && seconds_since(written_) > kForGil) give_stack(settings_.stack_without_gil());
  if (reported_ == now.windows || !stands_still(seconds_since(changed_), patience)) return;
  reported_ = now.windows;
  report();
}

// Outside of a step nobody knows how long something may take; nor in the first one, unless it waits for others.
bool StallWatch::stands_still(double still, double patience) const {
  if (still < patience) return false;
  switch (pulse_.doing) {
    case Doing::tick:
    case Doing::finish:
    case Doing::closing:
      return true;
    case Doing::forward:
    case Doing::backward:
    case Doing::optimizer:
      return pulse_.windows > 0;
    default:
      return false;
  }
}

Record StallWatch::own_record() const {
  const auto snapshot = progress_->read();
  auto record = record_of(snapshot, Life::runs, seconds_since(changed_));
  const std::lock_guard lock(mutex_);
  record.stack = stack_;
  return record;
}

// A rank that keeps others waiting tells where its Python code is, as soon as it has been asked.
void StallWatch::write_record() {
  const auto record = own_record();
  written_ = Clock::now();
  written_doing_ = record.doing;
  if (!record.waits()) {
    const std::lock_guard lock(mutex_);
    wants_stack_ = true;
  }
  ask_store(kForStore, [key = key_ + "/" + std::to_string(rank_), text = encode(record)](c10d::Store& store) {
    store.set(key, text);
    return true;
  });
}

bool StallWatch::wants_stack() const {
  const std::lock_guard lock(mutex_);
  return wants_stack_;
}

void StallWatch::give_stack(std::vector<std::string> lines) {
  const std::lock_guard lock(mutex_);
  wants_stack_ = false;
  if (lines == stack_) return;
  stack_ = std::move(lines);
  has_new_stack_ = true;
}

bool StallWatch::takes_new_stack() {
  const std::lock_guard lock(mutex_);
  return std::exchange(has_new_stack_, false);
}

std::optional<Report> StallWatch::take_report() {
  const std::lock_guard lock(mutex_);
  return std::exchange(report_, std::nullopt);
}

void StallWatch::report() {
  node_.look();
  node_.records();
  if (!pause(kForOthers + std::min(rank_, 25) * 0.02)) return;
  const auto window = std::to_string(pulse_.windows);
  const auto claim =
      ask_store(kForStore, [key = key_ + "/claims/" + window](c10d::Store& store) { return store.add(key, 1); });
  if (progress_->pulse() != pulse_) return;  // it goes on
  if (!claim) return report_of_this_machine();
  if (*claim > 1) {
    say("fastddp: rank " + std::to_string(rank_) + " stands still too; another rank reports.");
    return settings_.raises ? wait_for_report(window) : void();
  }
  auto found = diagnose(all_records(), ranks_);
  // Where the GIL is held for ever, a rank gets its stack another way, and later.
  for (int more = 0; more < 4 && lacks_stack(found); ++more) {
    if (!pause(0.5)) return;
    found = diagnose(all_records(), ranks_);
  }
  publish(std::move(found));
}

void StallWatch::report_of_this_machine() {
  auto records = node_.records();
  const auto is_lower = [&](const Record& of) { return of.life == Life::runs && of.rank < rank_; };
  if (std::ranges::any_of(records, is_lower)) return;
  records.push_back(own_record());
  auto report = diagnose(records, ranks_);
  report.headline += " The store does not answer, so only the ranks of this machine are known.";
  publish(std::move(report));
}

// Pages are newer than what ranks wrote, and speak for those that can write no more; stacks are only in what they wrote.
std::vector<Record> StallWatch::all_records() {
  std::map<int, Record> records;
  const auto written = ask_store(kForStore + ranks_ * 1e-3, [key = key_, ranks = ranks_](c10d::Store& store) {
    std::vector<std::string> there;
    for (int rank = 0; rank < ranks; ++rank) {
      if (store.check({key + "/" + std::to_string(rank)})) there.push_back(key + "/" + std::to_string(rank));
    }
    return there.empty() ? std::vector<std::vector<uint8_t>>{} : store.multiGet(there);
  });
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  for (const auto& text : written.value_or(std::vector<std::vector<uint8_t>>{})) {
    const auto record = decode_record({text.begin(), text.end()});
    if (static_cast<double>(ms - record.written) * 1e-3 < kFresh) records[record.rank] = record;
  }
  for (auto& record : node_.records()) {
    const auto of = records.find(record.rank);
    if (of != records.end()) record.stack = of->second.stack;
    records[record.rank] = record;
  }
  records[rank_] = own_record();
  std::vector<Record> all;
  for (auto& [rank, record] : records) all.push_back(std::move(record));
  return all;
}

void StallWatch::publish(Report report) {
  say(report.text());
  const auto raised = report.is_soft() ? "" : report.text();
  ask_store(kForStore, [=, key = key_ + "/report/" + std::to_string(pulse_.windows)](c10d::Store& store) {
    store.set(key, raised);
    return true;
  });
  if (settings_.raises && !raised.empty()) settings_.raises->interrupt(raised);
  const std::lock_guard lock(mutex_);
  report_ = std::move(report);
}

void StallWatch::wait_for_report(const std::string& window) {
  const auto raised = ask_store(kForStore, [key = key_ + "/report/" + window](c10d::Store& store) {
    store.wait({key}, std::chrono::milliseconds(static_cast<int64_t>(kForStore * 1000)));
    return store.get_to_str(key);
  });
  if (raised && raised->empty()) return;  // waiting helps
  settings_.raises->interrupt(raised.value_or("fastddp: this rank stands still, and no other rank says why."));
}

// The first rank to claim speaks: all that fail because of another one come by here before they end, so it sees none of them
// among those that have ended.
void StallWatch::name_who_has_ended() {
  const auto own = progress_->read();
  if (own.state != static_cast<uint32_t>(WindowState::reducing) || getpid() != pid_) return;
  end_thread();
  node_.look();
  std::vector<Record> ended;
  // A rank that ends in good order closes its connections a moment before it is gone.
  for (int looks = 0; ended.empty() && looks < 20; ++looks) {
    if (looks > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (auto& record : node_.records()) {
      if (record.life == Life::gone) ended.push_back(std::move(record));
    }
  }
  if (ended.empty()) return;
  const auto claim = ask_store(kForStore, [key = key_ + "/ended"](c10d::Store& store) { return store.add(key, 1); });
  if (claim && *claim > 1) return;
  auto report = diagnose(ended, static_cast<int>(ended.size()));
  std::erase_if(report.findings, [](const Finding& finding) { return finding.cause != Cause::gone; });
  report.headline = "step " + std::to_string(own.windows + 1) + " has failed on rank " + std::to_string(rank_) +
                    ", for want of another one.";
  say(report.text());
}

// One write, so that lines of several ranks do not mix.
void StallWatch::say(const std::string& text) const {
  if (!settings_.prints) return;
  const auto line = text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

}  // namespace fastddp
