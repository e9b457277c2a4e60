#include "watch/stall_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <set>
#include <string>
#include <tuple>

#include "errors/see.h"
#include "watch/last_words.h"
#include "window/window.h"

namespace fastddp {
namespace {

constexpr size_t kFirstSteps = 3;
// How long after this rank all others are sure, too: ranks look a few times a second.
constexpr double kForOthers = 1.0, kForThoseThatWait = 1.0;
constexpr double kForPages = 0.3;      // pages are there at once
constexpr double kBeforeDevice = 1.0;  // a host that goes on asks its device nothing
constexpr double kAsks = 60.0;         // seconds, roughly, of keepalive; a connection bears twice as many
constexpr double kForOthersReport = 6.0;
constexpr double kSlow = 3.0;    // times as long as for a network that is down
constexpr double kForGil = 0.8;  // the Python thread looks twice a second
constexpr double kFirstRewrite = 5.0, kLastRewrite = 20.0;
constexpr double kFresh = 45.0;  // for so many seconds a record counts as what a rank does now
static_assert(kFresh > 2 * kLastRewrite);

double seconds_since(std::chrono::steady_clock::time_point moment) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - moment).count();
}

// Whether the first finding's rank could give a stack and has not.
bool lacks_stack(const Report& report) {
  if (!report.stack.empty() || report.findings.empty()) return false;
  const auto cause = report.findings.front().cause;
  return cause >= Cause::outside && cause <= Cause::optimizer && cause != Cause::other_graph && cause != Cause::device;
}

}  // namespace

StallWatch::StallWatch(std::shared_ptr<const Progress> progress, c10::intrusive_ptr<c10d::Store> store, std::string key,
                       uint64_t job, Settings settings)
    : progress_(std::move(progress)),
      settings_(settings),
      pid_(getpid()),
      board_(std::move(store), std::move(key)),
      node_(job, progress_->rank()),
      who_has_(board_.another()),
      seen_{.pulse = progress_->pulse(), .changed = Clock::now(), .window_ended = Clock::now()},
      written_{.until_again = kFirstRewrite},
      thread_([this] { run(); }) {
  speaks_last(*this);
  if (settings_.waits) settings_.waits->explain_by([this] { return who_has_ended(); });
}

StallWatch::~StallWatch() {
  if (settings_.waits) settings_.waits->explain_by(nullptr);
  speaks_no_more(*this);
  if (getpid() != pid_) {
    thread_.detach();  // a forked process has no such thread
    return;
  }
  end_thread();
}

void StallWatch::end_thread() {
  end_.request_stop();
  std::call_once(ended_, [this] {  // a thread that terminates may come here, too
    thread_.join();
    say_if_it_goes_on();  // the step may have gone on a moment ago
  });
}

bool StallWatch::pause(double seconds) {
  std::mutex unused;  // only this thread pauses
  std::unique_lock lock(unused);
  const auto ends = [&] { return end_.stop_requested(); };
  return !pauses_.wait_for(lock, end_.get_token(), std::chrono::duration<double>(seconds), ends);
}

// Only results are progress: that the rank does something else is not enough.
void StallWatch::say_if_it_goes_on() {
  if (!asked_.told) return;
  const auto now = progress_->pulse();
  const auto& [before, since] = *asked_.told;
  const bool goes_on = now.windows != before.windows || now.finished != before.finished || now.gradients != before.gradients ||
                       (before.device_wait && now.device_wait != before.device_wait);
  if (!goes_on) return;
  say("fastddp: step " + std::to_string(before.windows + 1) + " went on after " + in_seconds(seconds_since(since)) + " (" +
      time_of_day(ms_since_1970()) + ")");
  asked_.told.reset();
}

void StallWatch::run() {
  std::set<std::string> said;
  while (pause(std::min(0.25, settings_.patience / 8))) {
    try {
      look();
    } catch (const std::exception& error) {
      if (const auto text = in_words(error); said.insert(text).second) {
        say("fastddp: what stands still cannot be found out: " + text);
      }
    }
  }
}

// A failed device fails at each look, so we no longer ask it. What its host does is still worth knowing.
void StallWatch::look_at_device() {
  if (!settings_.device || seen_.device_fails) return;
  const bool is_idle = seconds_since(seen_.changed) > std::min(kBeforeDevice, 0.2 * settings_.patience);
  if (!progress_->pulse().device_wait && !is_idle) return;
  try {
    settings_.device->look();
  } catch (const std::exception& error) {
    seen_.device_fails = true;
    say("fastddp: the device of rank " + std::to_string(progress_->rank()) + " does not say how far it is: " + in_words(error));
  }
}

void StallWatch::look() {
  look_at_device();
  const auto now = progress_->pulse();
  if (now != seen_.pulse) seen_.changed = Clock::now();
  if (now.windows != seen_.pulse.windows) {
    seen_.window_ended = seen_.changed;
    written_.doing.reset();
    written_.until_again = kFirstRewrite;
    asked_.again.reset();
    asked_.said.reset();
    board_.try_again();
    stack_.forget();  // it would pass for a stack of this window
  }
  seen_.pulse = now;
  say_if_it_goes_on();
  if (!seen_.node && now.windows > 0) {
    node_.look();
    seen_.node = true;
  }
  // Others may ask what it lacks (note [Who has what]).
  const bool may_write = !written_.doing && seconds_since(seen_.changed) > kLongWait;
  if (may_write && record_of(progress_->read(), Life::runs, 0).waits()) write_record();
  auto patience = std::max(settings_.patience, 5 * progress_->longest_step());
  if (now.windows < kFirstSteps) patience *= 3;  // ranks compile and warm up, some longer than others
  if (seconds_since(seen_.window_ended) < 0.6 * patience) return links_.leave();
  const bool asks =
      stands_still(seconds_since(seen_.changed), 0.6 * patience) && seconds_since(seen_.changed) < patience + kAsks;
  asks ? links_.ask() : links_.leave();
  links_.look();
  if (seconds_since(seen_.window_ended) < 0.8 * patience) return;
  // Before the report: a rank that reports is busy for a while.
  if (written_.doing && stack_.is_wanted() && seconds_since(written_.at) > kForGil) {
    auto stack = settings_.stack_without_gil();
    if (!stack.empty()) stack.emplace_back("(the GIL is held by a call that does not return)");
    stack_.give(std::move(stack));
  }
  const bool says_something_new =
      !written_.doing || stack_.takes_new() || (now.doing != *written_.doing && seconds_since(written_.at) > 1);
  const bool is_old = seconds_since(written_.at) > written_.until_again;
  if (is_old) written_.until_again = std::min(2 * written_.until_again, kLastRewrite);
  if (says_something_new || is_old) write_record();
  // Waiting may have helped before, but may no longer help.
  const bool is_due = asked_.reported != now.windows || (asked_.again && Clock::now() > *asked_.again);
  if (!is_due || !stands_still(seconds_since(seen_.changed), patience)) return;
  asked_.reported = now.windows;
  report(patience);
}

// Nobody knows how long something may take outside of a step, or in the first one unless the rank waits for others.
bool StallWatch::stands_still(double still, double patience) const {
  if (still < patience) return false;
  switch (seen_.pulse.doing) {
    case What::tick:
    case What::finish:
    case What::closing:
    case What::gather:
    case What::agree:
      return true;
    case What::forward:
    case What::backward:
    case What::optimizer:
      return seen_.pulse.windows > 0;
    default:
      return seen_.pulse.device_wait && seen_.pulse.device_wait->has_begun;
  }
}

Record StallWatch::own_record() const {
  const auto snapshot = progress_->read();
  auto record = record_of(snapshot, Life::runs, seconds_since(seen_.changed));
  record.other_model = node_.awaited_elsewhere(record);
  record.unanswered = {links_.unanswered().begin(), links_.unanswered().end()};
  record.moved = links_.moved();
  std::tie(record.stack, record.stack_at) = stack_.last();
  return record;
}

// If the rank keeps others waiting, asks for its Python stack, which goes into the next record.
void StallWatch::write_record() {
  const auto record = own_record();
  written_.at = Clock::now();
  written_.doing = record.doing;
  if (!record.waits()) stack_.want();
  board_.write(record);
}

void StallWatch::report(double patience) {
  node_.look();
  node_.records();
  // Ranks that wait claim first: a rank that does not wait may be unable to run its user's callback.
  const double after_others = own_record().waits() ? 0.0 : kForThoseThatWait;
  if (!pause((board_.answers() ? kForOthers : kForPages) + after_others + std::min(progress_->rank(), 25) * 0.02)) return;
  const bool is_first = claims();
  if (progress_->pulse() != seen_.pulse) return asked_.reported.reset();  // it goes on
  if (board_.answers() && !is_first && follow(patience)) return;
  auto found =
      outlasting(patience, [&] { return diagnose(board_.answers() ? all_records() : machine_records(), progress_->ranks()); });
  // If the GIL is held for ever, a rank gets its stack in another way, and later.
  for (int more = 0; found && board_.answers() && more < 4 && lacks_stack(*found); ++more) {
    if (!pause(0.5)) return;
    found = diagnose(all_records(), progress_->ranks());
  }
  if (!found) return;
  const bool ends = found->prospect == Prospect::stuck || seconds_since(seen_.changed) > settings_.idle_patience;
  ends ? asked_.again.reset() : look_again_later(patience);
  if (!board_.answers()) {
    found->headline += " The store does not answer, so only the ranks of this machine are known.";
    const auto is_lower = [&](const Record& of) { return of.life == Life::runs && of.rank < progress_->rank(); };
    if (std::ranges::any_of(node_.records(), is_lower)) {
      keep(*found, seen_.pulse.windows);
      return ends ? interrupt(found->text()) : void();
    }
  }
  publish(std::move(*found), ends);
}

void StallWatch::look_again_later(double patience) {
  const auto left = settings_.idle_patience - seconds_since(seen_.changed);
  const std::chrono::duration<double> pause(left > 0 ? std::min(patience, left) : patience);
  asked_.again = Clock::now() + std::chrono::duration_cast<Clock::duration>(pause);
}

// Whether this rank reports, as long as the store answers.
bool StallWatch::claims() {
  if (asked_.claimed == seen_.pulse.windows) return true;
  const bool is_first = board_.is_first("claims/" + std::to_string(seen_.pulse.windows)).value_or(false);
  if (is_first) asked_.claimed = seen_.pulse.windows;
  return is_first;
}

// It is not enough that this rank does something else while it waits: a wait for a hook ends, whatever the network does.
bool StallWatch::something_arrived() const {
  const auto now = progress_->pulse();
  return now.windows != seen_.pulse.windows || now.finished != seen_.pulse.finished;
}

// What `find` finds once an outage of the network would be over. None: the step goes on, and may be reported again.
template <typename Find>
std::optional<Report> StallWatch::outlasting(double patience, const Find& find) {
  auto found = find();
  if (!found.may_be_an_outage()) return found;
  const auto comes_back = patience + settings_.patience;
  const auto is_slow = [&] { return carries_bytes(links_.moved()) && seconds_since(seen_.changed) < kSlow * comes_back; };
  while (seconds_since(seen_.changed) < comes_back || is_slow()) {
    if (!pause(0.25)) return std::nullopt;
    links_.look();
    if (something_arrived()) {
      asked_.reported.reset();
      say("fastddp: step " + std::to_string(seen_.pulse.windows + 1) + " goes on: the network was down, or is slow.");
      return std::nullopt;
    }
  }
  return find();
}

// Pages are newer than what ranks wrote, and speak for ranks that can no longer write.
std::vector<Record> StallWatch::all_records() {
  std::map<int, Record> records;
  std::vector<int> ranks(static_cast<size_t>(progress_->ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  for (auto& record : board_.read(ranks)) {
    const auto age = static_cast<double>(ms_since_1970() - record.written) * 1e-3;
    if (age < kFresh) records[record.rank] = std::move(record);
  }
  for (auto& record : machine_records()) {
    const auto of = records.find(record.rank);
    if (of != records.end() && record.is_stale) {
      const auto life = record.life;
      record = of->second;  // what it wrote last
      record.life = life;
    } else if (of != records.end() && record.rank != progress_->rank()) {
      static_cast<BesideThePage&>(record) = of->second;
    }
    records[record.rank] = record;
  }
  std::vector<Record> all;
  for (auto& [rank, record] : records) all.push_back(std::move(record));
  return all;
}

// What is no worse than what was said of this step is not said again.
void StallWatch::publish(Report report, bool ends) {
  const bool is_new = asked_.said < report.prospect, raises = ends && settings_.raises;
  if (is_new && !raises) say(report.text());
  if (!raises) asked_.told = {seen_.pulse, seen_.changed};
  keep(report, seen_.pulse.windows);
  board_.publish(seen_.pulse.windows, report, ends);
  if (raises) {
    interrupt(report.text());
    // The error says it, unless nobody gets it: the thread may wait where it cannot be interrupted.
    for (int looks = 0; !settings_.raises->has_raised() && looks < 10; ++looks) pause(0.2);
    if (is_new && !settings_.raises->has_raised()) say(report.text());
  }
  if (!is_new) return;
  asked_.said = report.prospect;
  const std::lock_guard lock(found_.mutex);
  found_.report = std::move(report);
}

// Another rank reports. This one raises as soon as that report is there, unless it says that the step may go on. Returns whether
// nothing is left to do: if no report comes, this rank makes one.
bool StallWatch::follow(double patience) {
  if (!settings_.raises) return true;
  const auto begin = Clock::now();
  while (board_.answers() && seconds_since(begin) < patience + kForOthersReport) {
    if (!pause(0.2)) return true;
    if (something_arrived()) {
      asked_.reported.reset();
      return true;
    }
    const auto found = board_.published(seen_.pulse.windows);
    if (!found) continue;
    found->text.empty() ? look_again_later(patience) : interrupt(found->text);
    return true;
  }
  return false;
}

// The error comes before the abort: the host goes on as soon as the device does, maybe inside a hook, where nobody can tell.
void StallWatch::interrupt(const std::string& why) const {
  if (!settings_.raises) return;
  settings_.raises->interrupt(why + see("FD016"));
  for (const auto& error : settings_.raises->abort_groups()) {
    say("fastddp: rank " + std::to_string(progress_->rank()) +
        " cannot abort a process group, so its device may wait on: " + error);
  }
}

// A single write, so that lines of several ranks do not mix.
void StallWatch::say(const std::string& text) const {
  if (!settings_.prints) return;
  const auto line = text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

}  // namespace fastddp
