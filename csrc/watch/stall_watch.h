// Notices that a step stands still, and says why.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "observe/progress.h"
#include "transport/interruption.h"
#include "watch/diagnosis.h"
#include "watch/node.h"

namespace fastddp {

// Note [Stalls]
// A thread of each rank looks at the rank's own progress a few times a second. It takes neither the GIL nor the reducer's lock,
// one of which the thread that stands still may hold.
//
//   Nothing ends for most of `patience`: the rank writes its record to the store, under a key of its own, and once more
//   whenever it does something else. So ranks that keep others waiting have said where they are.
//   It waits for others, or stands still inside a step, for all of it: the rank reads the pages of its machine and claims the
//   report. The first to claim reads what all have written, and writes the report to the store and to stderr; the others
//   write a line each.
//
// Where a rank ends, collectives of gloo fail at once on the others: the connection is closed, says the error, and not whose it
// was. So a process that ends inside a backward, as one that raised leaves it, looks who is not there any more.
//
// Steps are alike on all ranks, so all of this happens at the same time on each. While steps end, nobody uses the store. The
// store may be what is broken: every use of it is given up after a few seconds, and then what the machine's pages say is all.
class StallWatch {
 public:
  struct Settings {
    double patience;                       // seconds; five times the longest of the last steps, if that is more
    bool prints;                           // to stderr
    std::shared_ptr<Interruption> raises;  // null: a report is all
    std::function<std::vector<std::string>()> stack_without_gil;  // where the GIL is held for ever
  };

  // `key`: of this model, in the store; the same on all ranks.
  StallWatch(std::shared_ptr<const Progress> progress, c10::intrusive_ptr<c10d::Store> store, std::string key,
             uint64_t job, Settings settings);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  // For a thread of Python's, which is not there when the GIL is held for ever.
  bool wants_stack() const;
  void give_stack(std::vector<std::string> lines);
  // What has been found since the last call.
  std::optional<Report> take_report();
  // For a process that is about to end: where that is because another rank of its machine has, it says so. It takes two
  // seconds at most, and ends the watch.
  void name_who_has_ended();

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void end_thread();
  bool pause(double seconds);
  void look();
  bool stands_still(double still, double patience) const;
  bool takes_new_stack();
  Record own_record() const;
  void write_record();
  // What `function(store)` returns; none, if the store does not answer. Then it is left alone until the next window.
  template <typename Function>
  auto ask_store(double seconds, Function function) -> std::optional<decltype(function(std::declval<c10d::Store&>()))>;
  void report();
  void report_of_this_machine();
  std::vector<Record> all_records();
  void publish(Report report);
  void wait_for_report(const std::string& window);
  void say(const std::string& text) const;

  const std::shared_ptr<const Progress> progress_;
  const c10::intrusive_ptr<c10d::Store> store_;  // others of this process use it, and may wait for its answers
  c10::intrusive_ptr<c10d::Store> own_store_;    // a connection of its own, once there is something to say
  bool store_answers_ = true;
  const std::string key_;
  const Settings settings_;
  const int rank_, ranks_;
  const int pid_;
  Node node_;

  // Of the thread.
  Progress::Pulse pulse_;
  Clock::time_point changed_, window_ended_, written_;
  std::optional<Doing> written_doing_;
  double rewrite_ = 0;              // seconds until it is written once more
  std::optional<size_t> reported_;  // the window
  bool knows_node_ = false;

  mutable std::mutex mutex_;
  std::condition_variable ends_;
  bool is_over_ = false;
  bool wants_stack_ = false;
  bool has_new_stack_ = false;
  std::vector<std::string> stack_;
  std::optional<Report> report_;
  std::thread thread_;  // last: it uses the members above
};

}  // namespace fastddp
