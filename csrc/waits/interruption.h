// Interruption: lets another thread end this thread's waits for other ranks.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fastddp {

// The error's text, without the C++ stack that torch's errors list.
std::string in_words(const std::exception& error);

// Null: the process group has no futures, and c10d raises.
c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work);

// Note [Interrupted waits]
// Over gloo, a collective that other ranks never join cannot be cancelled, but a wait for its future can. After that the process
// group is useless, because its threads still wait. Its destructor would wait too. So we never destroy the group, and the process
// can end. Messages between pairs of ranks have no future, but can be aborted. A process group written in Python does not tell
// messages from collectives, and its future may be done only when somebody waits for the work. Its works are waited for to their
// end. No wait has a timeout of its own, because a wait for a message that times out breaks the connection.
// On a device with streams the host does not wait here, and NCCL takes a wait that times out for a broken network. There only
// the next check() raises, and the interrupting thread aborts the groups.
class Interruption {
 public:
  // Called by any thread, counts once: waits raise c10::Error with this text, those that have begun and those that follow.
  void interrupt(const std::string& why);
  bool is_interrupted() const { return is_interrupted_; }
  // Whether a thread has got the error.
  bool has_raised() const { return has_raised_; }
  // Sets the groups to abort, all at once, to end waits on a device. Empty: no device waits.
  void may_abort(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups) {
    const std::lock_guard lock(mutex_);
    groups_ = std::move(groups);
  }
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const {
    const std::lock_guard lock(mutex_);
    return groups_;
  }
  // Aborts all groups. Returns the errors of those that cannot be aborted.
  [[nodiscard]] std::vector<std::string> abort_groups() const;
  // Called when a wait fails, before it raises. Returns the known cause in words, which is added to the error. Null: no cause.
  void explain_by(std::function<std::string()> explain) {
    const std::lock_guard lock(explaining_);
    explain_ = std::move(explain);
  }
  // If waits have been interrupted: never destroys `things`, which hold process groups and would wait in their destructors.
  template <typename... Things>
  void keep_for_good(const Things&... things) const {
    if (is_interrupted_) (static_cast<void>(new auto(things)), ...);
  }
  // Raises the error of interrupt(), if that was called.
  void check() const;

  // While it lives, this thread's waits can be interrupted. If scopes are nested, the inner one counts.
  class Scope {
   public:
    // `device`: the device of the tensors that are waited for.
    Scope(Interruption& interruption, c10::Device device);
    ~Scope();
    C10_DISABLE_COPY_AND_ASSIGN(Scope);

   private:
    Interruption* const before_;
  };

  // Like Work::wait().
  static void wait(c10d::Work& work);
  // Like Future::waitAndThrow().
  static void wait(c10::ivalue::Future& future);
  // Like Work::wait(), outside of a window: each of `all` can end it.
  static void wait_outside(c10d::Work& work, const std::vector<std::shared_ptr<Interruption>>& all);
  // Waits for at most `patience`. Whether the future is done.
  static bool wait(c10::ivalue::Future& future, std::chrono::milliseconds patience);

 private:
  void wait_for_pair(c10d::Work& work);
  // Rethrows the current exception with its explanation.
  [[noreturn]] void rethrow_explained();

  std::atomic<bool> is_interrupted_{false};
  mutable std::atomic<bool> has_raised_{false};
  mutable std::mutex mutex_;
  std::string why_;
  c10d::Work* of_pair_ = nullptr;  // a message between two ranks that a thread waits for
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  std::mutex explaining_;
  std::function<std::string()> explain_;
};

}  // namespace fastddp
