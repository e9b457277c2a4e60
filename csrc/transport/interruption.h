// Waits for other ranks that another thread can end.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace fastddp {

// What it says, without the calls of C++ that torch's errors list.
std::string in_words(const std::exception& error);

// Note [Interrupted waits]
// A collective that other ranks never join cannot be called off over gloo: what waits for it can. After that the process
// group is of no use, since its threads still wait, and so would its destructor: whoever interrupts keeps the group for good,
// and the process can end. Messages between pairs of ranks can be aborted, and are, because a wait for them that times out
// breaks the connection. On a device with streams no host waits here, and NCCL
// takes a wait that times out for a broken network: there only what comes raises, and who interrupts aborts the group.
class Interruption {
 public:
  // By any thread, once: waits that last raise c10::Error with this text, and so do those that come.
  void interrupt(const std::string& why);
  bool is_interrupted() const { return is_interrupted_; }
  // What ends waits on a device: these groups, all at once. None: no device waits.
  void may_abort(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups);
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const;
  // What those said that cannot be aborted: the others are.
  [[nodiscard]] std::vector<std::string> abort_groups() const;
  // Asked where a wait fails, before it raises: what is known of the cause, in words, to be added to the error. Null: nobody.
  void explain_by(std::function<std::string()> explain);
  // Where waits have been interrupted: does so with what holds process groups, and waits when it goes.
  template <typename... Things>
  void keep_for_good(const Things&... things) const {
    if (is_interrupted_) (static_cast<void>(new auto(things)), ...);
  }
  // Raises that error, if there is one.
  void check() const;

  // Makes this thread's waits such that can be interrupted, for as long as it lives. Of two, one inside the other, the inner one
  // counts.
  class Scope {
   public:
    // `device`: where what is waited for lies.
    Scope(Interruption& interruption, c10::Device device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Interruption* const before_;
  };

  // Like Work::wait().
  static void wait(c10d::Work& work);
  // Like Future::waitAndThrow().
  static void wait(c10::ivalue::Future& future);
  // Whether it is done so soon.
  static bool wait(c10::ivalue::Future& future, std::chrono::milliseconds patience);

 private:
  template <typename Wait>
  void wait_for_pair(c10d::Work& work, const Wait& wait);
  // What is being handled.
  [[noreturn]] void rethrow_explained();

  std::atomic<bool> is_interrupted_{false};
  mutable std::mutex mutex_;
  std::string why_;
  c10d::Work* of_pair_ = nullptr;  // that is waited for
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  std::mutex explaining_;
  std::function<std::string()> explain_;
};

}  // namespace fastddp
