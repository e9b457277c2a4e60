// Notices that a step stands still, and says why.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
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

#include "observe/device_progress.h"
#include "observe/progress.h"
#include "transport/interruption.h"
#include "watch/board.h"
#include "watch/diagnosis.h"
#include "watch/links.h"
#include "watch/node.h"

namespace fastddp {

// Note [Stalls]
// A thread of each rank looks at the rank's own progress a few times a second. It takes neither the GIL nor the reducer's lock,
// one of which the thread that stands still may hold.
//
//   Nothing ends for most of `patience`: the rank writes its record to the store, under a key of its own, and once more
//   whenever it does something else. So ranks that keep others waiting have said where they are.
//   It waits for others, or stands still inside a step, for all of it: the rank reads the pages of its machine and claims the
//   report. The first to claim reads what all have written, and writes the report to the store and to stderr, and
//   a line when the step goes on. The others say nothing.
//
// Where a rank ends, collectives of gloo fail at once on the others: the connection is closed, says the error, and not whose it
// was. So a process that ends inside a backward, as one that raised leaves it, looks who is not there any more.
//
// On a device with streams the host does not wait in the reducer: it goes on, and stands still wherever it asks for a number.
// So as soon as it does nothing for a while, the device is asked which bucket's collective has not ended. A rank whose device has
// come to that collective waits for others; one whose device has not is what they wait for.
//
// A network that is down for a moment is no reason to end a job, and TCP takes its time to come back: it tries again after
// pauses that double. So a report that the network is what is wrong, or that nothing is known of a rank, comes as much later
// again, and not at all where the step goes on until then. As long as bytes move there, it waits three times as long.
//
// Steps are alike on all ranks, so all of this happens at the same time on each. While steps end, nobody uses the store. Where it
// does not answer, what the machine's pages say is all.
class StallWatch {
 public:
  struct Settings {
    double patience;                         // seconds; five times the longest of the last steps, if that is more
    bool prints;                             // to stderr
    std::shared_ptr<Interruption> raises;    // null: a report is all
    std::shared_ptr<DeviceProgress> device;  // null: there is none
    std::shared_ptr<Interruption> waits;     // where they fail, it says which rank has ended; null: nobody asks
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
  // For it too: whether ranks of its machine are in a step that has not ended.
  bool leaves_others();
  // For one whose collective has failed: the same, in words. Empty: nobody has ended, as far as can be seen.
  std::string who_has_ended();
  // For a process that is about to be ended (note [Last words]): whether it has said which rank of its machine does something
  // else than the others.
  bool name_who_differs();
  // For the first: in JSON, why the step stood still in which this process ends, by whichever rank it was reported; empty, if
  // it did not. It asks the store only where it did, for a few seconds at most.
  std::string report_of_open_step();

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void end_thread();
  std::optional<Report> find_who_has_ended();
  bool pause(double seconds);
  void look();
  void look_at_device();
  void say_if_it_goes_on();
  bool stands_still(double still, double patience) const;
  bool takes_new_stack();
  Record own_record() const;
  void write_record();
  void report(double patience);
  bool claims();
  std::vector<Record> machine_records();
  std::vector<Record> all_records();
  template <typename Find>
  std::optional<Report> outlasting(double patience, const Find& find);
  bool something_arrived() const;
  void publish(Report report);
  void follow(double seconds);
  void interrupt(const std::string& why) const;
  void keep(const Report& report);
  void say(const std::string& text) const;

  const std::shared_ptr<const Progress> progress_;
  const Settings settings_;
  const int rank_, ranks_;
  const int pid_;
  Board board_;
  Node node_;
  Links links_;

  // Of the thread.
  Progress::Pulse pulse_;
  Clock::time_point changed_, window_ended_, written_;
  std::optional<Doing> written_doing_;
  double rewrite_;                            // seconds until it is written once more
  std::optional<size_t> reported_, claimed_;  // windows
  std::optional<Clock::time_point> soft_;     // when it was found last that waiting helps, in this window
  struct Told {
    Progress::Pulse pulse;
    Clock::time_point since;  // it had stood still
  };
  std::optional<Told> told_;  // what this rank has reported of a step that may go on
  bool knows_node_ = false;
  bool device_fails_ = false;

  mutable std::mutex mutex_;
  std::condition_variable ends_;
  bool is_over_ = false;
  bool named_who_has_ended_ = false;
  bool wants_stack_ = false;
  bool has_new_stack_ = false;
  std::vector<std::string> stack_;
  std::optional<Report> report_;
  std::pair<size_t, std::string> kept_;  // the step's number, and its last report that is not soft, in JSON
  std::thread thread_;                   // last: it uses the members above
};

}  // namespace fastddp
