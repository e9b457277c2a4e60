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
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fastddp {

using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

// The error's text, without the C++ stack that torch's errors list.
std::string in_words(const std::exception& error);

// Null: the process group has no futures, and c10d raises.
c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work);

// Note [Interrupted waits]
// Over gloo, a collective that other ranks never join cannot be cancelled, but a wait for its future can. After that the process
// group is useless, because its threads still wait: note [Groups that are left]. Messages between pairs of ranks have no future, but can be aborted. A process group written in Python does not tell
// messages from collectives, and its future may be done only when somebody waits for the work. Its works are waited for to their
// end. No wait has a timeout of its own, because a wait for a message that times out breaks the connection.
// On a device with streams the host does not wait here, and NCCL takes a wait that times out for a broken network. There only
// the next check() raises, and the interrupting thread aborts the groups.
//
// Note [Groups that are left]
// The destructor of a gloo group waits for its threads, and these for ranks that may be gone. So a thread of its own destroys a
// group of which a collective may be on its way, when nobody else holds it. The process can end meanwhile.
//
// Note [Whose error it is]
// Where a backend raises, a connection is lost, and the error becomes a c10::DistError, since gloo's have no class. That class says,
// in Python too (dist.DistError), that other ranks are to blame. What torch checks, memory that is not there and a device that fails
// are other c10::Errors or std::bad_alloc, and this rank's own. So is what a user's hook raises, unless it passes on gloo's error, of
// which callbacks make a text.

// A work of which users' code decides how it ends.
struct RunsUsersCode {};

class Interruption {
 public:
  // Called by any thread, counts once: waits raise c10::DistError with this text, those that have begun and those that follow.
  void interrupt(const std::string& why);
  bool is_interrupted() const { return is_interrupted_; }
  // Whether a thread has got the error.
  bool has_raised() const { return has_raised_; }
  // Sets the groups to abort, all at once, to end waits on a device. Empty: no device waits.
  void may_abort(Groups groups) {
    const std::lock_guard lock(mutex_);
    groups_ = std::move(groups);
  }
  Groups groups() const {
    const std::lock_guard lock(mutex_);
    return groups_;
  }
  // Aborts all groups. Returns the errors of those that cannot be aborted.
  [[nodiscard]] std::vector<std::string> abort_groups() const;
  // Called when a connection is lost, before that is raised. Returns the known cause in words, which is added to the error. Null: no cause.
  void explain_by(std::function<std::string()> explain) {
    const std::lock_guard lock(explaining_);
    explain_ = std::move(explain);
  }
  // Destroys these groups, and the memory that may be on its way in them, in another thread: note [Groups that are left].
  template <typename Memory>
  static void bury(Groups groups, const Memory& memory) {
    bury(std::move(groups), std::shared_ptr<const void>(std::make_shared<const Memory>(memory)));
  }
  // Rethrows the exception that is being handled, of a collective that could not start or has failed: note [Whose error it is].
  [[noreturn]] static void rethrow_explained(bool by_user);
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
  // Waits for at most `patience`; each of `others` can end it, too. Whether the future is done.
  static bool wait(c10::ivalue::Future& future, std::chrono::milliseconds patience,
                   const std::vector<std::shared_ptr<Interruption>>& others = {});

 private:
  static void bury(Groups groups, std::shared_ptr<const void> memory);
  void wait_for_pair(c10d::Work& work);

  std::atomic<bool> is_interrupted_{false};
  mutable std::atomic<bool> has_raised_{false};
  mutable std::mutex mutex_;
  std::string why_;
  std::multiset<c10d::Work*> of_pairs_;  // messages between two ranks that threads wait for
  Groups groups_;
  std::mutex explaining_;
  std::function<std::string()> explain_;
};

}  // namespace fastddp
