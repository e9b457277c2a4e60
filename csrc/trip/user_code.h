// Runs users' code from code that holds a lock.
#pragma once

#include <c10/util/Exception.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "errors/see.h"

namespace fastddp {

// Note [User code]
// Communication hooks and callbacks run without the reducer's lock, and so do waits for hooks' futures. So user code may call
// the model from any thread. But the ticks of a window have an order, so one thread at a time conducts them. While user code
// keeps that thread, gradients that come on other threads are noted. The conductor handles them when user code returns.

// Releases a lock that this thread holds, for as long as this lives.
class Unlocked {
 public:
  explicit Unlocked(std::mutex& held) : Unlocked(&held) {}
  // Null: nothing is released.
  explicit Unlocked(std::mutex* held) : lock_(held) {
    if (lock_ != nullptr) lock_->unlock();
  }
  ~Unlocked() {
    if (lock_ != nullptr) lock_->lock();
  }
  C10_DISABLE_COPY_AND_ASSIGN(Unlocked);

 private:
  std::mutex* const lock_;
};

// A part of an object. The object's lock is held for as long as this lives.
template <typename Part>
struct Locked {
  std::unique_lock<std::mutex> lock;
  Part& part;

  Part* operator->() const { return &part; }
};

// Knows which thread conducts. All functions are called with the lock held.
class Conductor {
 public:
  bool is_busy() const { return thread_ != std::thread::id(); }

  // This thread conducts for as long as this lives. Waits until no other thread conducts.
  class Turn {
   public:
    Turn(Conductor& conductor, std::mutex& held) : conductor_(conductor) {
      TORCH_CHECK(conductor_.thread_ != std::this_thread::get_id(),
                  "fastddp: a communication hook or a callback asked its model for something that waits for the end of that "
                  "hook or callback. Do it after backward.",
                  see("FD014"));
      conductor_.free_.wait(held, [&] { return !conductor_.is_busy(); });
      conductor_.thread_ = std::this_thread::get_id();
    }
    ~Turn() {
      conductor_.thread_ = {};
      conductor_.free_.notify_all();
    }
    C10_DISABLE_COPY_AND_ASSIGN(Turn);

   private:
    Conductor& conductor_;
  };

 private:
  std::thread::id thread_;
  std::condition_variable_any free_;
};

}  // namespace fastddp
