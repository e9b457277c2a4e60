// Notices that a step stands still, and says why.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "observe/device_progress.h"
#include "observe/progress.h"
#include "waits/interruption.h"
#include "watch/board.h"
#include "watch/diagnosis.h"
#include "watch/links.h"
#include "watch/node.h"
#include "watch/wanted_stack.h"
#include "watch/who_has.h"

namespace fastddp {

// Note [Stalls]
// A thread of each rank looks at the rank's own progress a few times a second. It takes neither the GIL nor the reducer's lock:
// the thread that stands still may hold one of them.
//
// - No step ends for most of `patience`: the rank writes its record to the store, under its own key, and again whenever it does
//   something else. So ranks that keep others waiting have said where they are.
// - The rank waits for others, or stands still inside a step, for all of `patience`: it reads the pages of its machine and
//   claims the report. The first to claim reads what all ranks have written. It writes the report to the store and to stderr,
//   and a line when the step goes on. The others say nothing.
//
// When a rank ends, gloo's collectives fail at once on the others. Their error says that a connection is closed, but not whose.
// So a process that ends inside a backward, as an exception leaves it, looks which ranks are gone.
//
// On a device with streams the host does not wait in the reducer: it goes on, and stands still where it asks for a number. So
// once the host has done nothing for a while, we ask the device which bucket's collective has not ended. If the device has come
// to that collective, the rank waits for others. If not, the others wait for this rank.
//
// Ranks raise where the step cannot go on. While a rank may only be in its own code (Prospect), it is reported, and looked at again
// each `patience`: it may end, or be stopped. Only after `idle_patience` do ranks raise all the same.
//
// A network that is down for a moment is no reason to end a job. TCP takes its time to come back, since its pauses between
// attempts double. So a report that the network is wrong, or that nothing is known of a rank, waits for as long again, and three
// times as long while bytes move. It is dropped if the step goes on until then.
//
// Steps are alike on all ranks, so all of this happens at the same time on each. While steps end, nobody uses the store. If it
// does not answer, only the pages of the machine are known.
class StallWatch {
 public:
  static constexpr int kLooks = 20;
  struct Settings {
    double patience;                         // seconds; five times the longest of the last steps, if that is more
    double idle_patience;                    // seconds that a rank may be in its own code before others raise
    bool prints;                             // to stderr
    std::shared_ptr<Interruption> raises;    // what a report interrupts; null: nothing
    std::shared_ptr<DeviceProgress> device;  // null: no device to watch
    std::shared_ptr<Interruption> waits;     // asks which rank has ended when its waits fail; null: nobody asks
    std::function<std::vector<std::string>()> stack_without_gil;  // for a GIL that is held for ever
  };

  // `key`: this model's in the store; the same on all ranks.
  StallWatch(std::shared_ptr<const Progress> progress, c10::intrusive_ptr<c10d::Store> store, std::string key, uint64_t job,
             Settings settings);
  ~StallWatch();
  C10_DISABLE_COPY_AND_ASSIGN(StallWatch);

  // For a Python thread that gives this rank's stack. It cannot run while the GIL is held.
  WantedStack& stack() { return stack_; }
  // The report made since the last call.
  std::optional<Report> take_report() {
    const std::lock_guard lock(found_.mutex);
    return std::exchange(found_.report, std::nullopt);
  }
  // Before the process ends: if that is because another rank of its machine has ended, says so. It takes two seconds at most,
  // and ends the watch.
  void name_who_has_ended();
  // Before the process ends: whether other ranks of its machine are in a step that has not ended, or go on while this one ends
  // in the middle of its own.
  bool leaves_others();
  // After a collective has failed: which rank has ended, in words, after so many looks, ten a second. Empty: none, as far as can
  // be seen.
  std::string who_has_ended(int looks = kLooks);
  // Before the process is ended (note [Last words]): says which rank of its machine does something else than the others.
  // Returns whether it has.
  bool name_who_differs();
  // For the thread that trains, which lacks gradients: what the other ranks of this window lack, as far as they say so within
  // `patience` seconds. None: the store does not answer.
  std::optional<Lacks> ask_who_has(double patience) {
    node_.look();
    return who_has_.ask(record_of(progress_->read(), Life::runs, 0), patience, [this] { return node_.records(); });
  }
  // Before the process ends: why its last step stood still, in JSON, whichever rank has reported it. Empty: it did not. The
  // store is asked only if it did, for a few seconds at most.
  std::string report_of_open_step();

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void end_thread();
  std::optional<Report> find_who_has_ended(int looks = kLooks);
  // Returns whether the thread goes on.
  bool pause(double seconds);
  void look();
  void look_at_device();
  void say_if_it_goes_on();
  bool stands_still(double still, double patience) const;
  Record own_record() const;
  void write_record();
  void report(double patience);
  bool claims();
  std::vector<Record> machine_records() {
    auto records = node_.records();
    records.push_back(own_record());
    return records;
  }
  std::vector<Record> all_records();
  template <typename Find>
  std::optional<Report> outlasting(double patience, const Find& find);
  bool something_arrived() const;
  void publish(Report report, bool ends);
  bool follow(double patience);
  void look_again_later(double patience);
  void interrupt(const std::string& why) const;
  void keep(const Report& report, size_t ended_windows) {
    const std::lock_guard lock(found_.mutex);
    if (!report.is_soft()) found_.kept = {ended_windows + 1, report.json()};
  }
  void say(const std::string& text) const;

  // What the last look has found. As links_ and what is below, it is the thread's alone, until that has ended.
  struct Seen {
    Pulse pulse;
    Clock::time_point changed, window_ended;
    bool node = false;  // the ranks of this machine
    bool device_fails = false;
  };
  // The record in the store.
  struct Written {
    Clock::time_point at = {};
    std::optional<What> doing = {};  // none: not in this window
    double until_again;              // seconds
  };
  // Reports of this window, or of the last one that had any.
  struct Asked {
    std::optional<size_t> reported, claimed;  // windows
    std::optional<Clock::time_point> again;   // when to look again: waiting may help, in this window
    std::optional<Prospect> said;             // the worst one, in this window
    struct Told {
      Pulse pulse;
      Clock::time_point since;  // the last change before the report
    };
    std::optional<Told> told;  // this rank's report of a step that may go on
  };
  // For other threads.
  struct Found {
    std::mutex mutex;
    std::optional<Report> report;
    std::pair<size_t, std::string> kept;     // the step's number, and its last report that is not soft, in JSON
    std::atomic<bool> who_has_ended{false};  // has been named
  };

  const std::shared_ptr<const Progress> progress_;
  const Settings settings_;
  const int pid_;
  Board board_;
  Node node_;
  WhoHas who_has_;
  Links links_;
  Seen seen_;
  Written written_;
  Asked asked_;
  Found found_;
  WantedStack stack_;
  std::stop_source end_;  // of the thread
  std::condition_variable_any pauses_;
  std::once_flag ended_;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace fastddp
