#include "waits/interruption.h"

#include <c10/util/ScopeExit.h>

#include <future>
#include <new>
#include <thread>
#include <utility>

#include "device/streams.h"
#include "errors/see.h"

namespace fastddp {
namespace {

constexpr auto kLook = std::chrono::milliseconds(200);
constexpr auto kForever = std::chrono::hours(24 * 365);

thread_local Interruption* of_this_thread = nullptr;

bool is_of_pair(const c10d::Work& work) {
  const auto type = work.retrieveOpType();
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV;
}

// Null, too, for all works of a process group written in Python: they are of an unknown kind.
c10::intrusive_ptr<c10::ivalue::Future> awaited_future(c10d::Work& work) {
  return work.retrieveOpType() == c10d::OpType::UNKNOWN ? nullptr : future_of(work);
}

}  // namespace

std::string in_words(const std::exception& error) {
  const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch == nullptr ? error.what() : of_torch->what_without_backtrace();
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void Interruption::interrupt(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (is_interrupted_) return;
  why_ = why;
  is_interrupted_ = true;
  for (auto* const work : of_pairs_) work->abort();
}

// An abort may wait for other ranks' aborts, so this runs all of them at once.
std::vector<std::string> Interruption::abort_groups() const {
  const auto all = groups();
  const std::set<c10::intrusive_ptr<c10d::ProcessGroup>> groups(all.begin(), all.end());
  std::vector<std::future<void>> aborts;
  for (const auto& group : groups) aborts.push_back(std::async(std::launch::async, [group] { group->abort(); }));
  std::vector<std::string> errors;
  for (auto& abort : aborts) {
    try {
      abort.get();
    } catch (const std::exception& error) {
      errors.push_back(in_words(error));
    }
  }
  return errors;
}

void Interruption::bury(Groups groups, std::shared_ptr<const void> memory) {
  std::thread([groups = std::move(groups), memory = std::move(memory)]() mutable {
    for (auto& group : groups) {
      while (group.use_count() > 1) std::this_thread::sleep_for(kLook);
    }
  }).detach();
}

void Interruption::rethrow_explained(bool by_user) {
  std::string what;
  try {
    throw;
  } catch (const c10::Error& error) {
    if (dynamic_cast<const c10::DistError*>(&error) == nullptr) throw;
    what = in_words(error);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    what = error.what();
    if (by_user && what.find("gloo/transport/") == std::string::npos) throw;
  }
  if (of_this_thread != nullptr) {
    const std::lock_guard lock(of_this_thread->explaining_);
    const auto why = of_this_thread->explain_ ? of_this_thread->explain_() : "";
    if (!why.empty()) what += "\n" + why + see("FD015");
  }
  TORCH_CHECK_WITH(DistBackendError, false, what);
}

void Interruption::check() const {
  if (!is_interrupted_) return;
  const std::lock_guard lock(mutex_);
  has_raised_ = true;
  TORCH_CHECK_WITH(DistBackendError, false, why_);
}

Interruption::Scope::Scope(Interruption& interruption, c10::Device device)
    : before_(std::exchange(of_this_thread, has_streams(device) ? nullptr : &interruption)) {}

Interruption::Scope::~Scope() {
  of_this_thread = before_;
}

void Interruption::wait(c10d::Work& work) {
  if (auto* const interruption = of_this_thread) {
    if (is_of_pair(work)) return interruption->wait_for_pair(work);
    interruption->check();
    if (const auto future = awaited_future(work)) wait(*future, kForever);
  }
  try {
    work.wait();
  } catch (const std::exception&) {
    rethrow_explained(dynamic_cast<const RunsUsersCode*>(&work) != nullptr);
  }
}

void Interruption::wait_for_pair(c10d::Work& work) {
  const auto enter = [&] {
    const std::lock_guard lock(mutex_);
    return of_pairs_.insert(&work);
  };
  const auto leave = c10::make_scope_exit([this, place = enter()] {
    const std::lock_guard lock(mutex_);
    of_pairs_.erase(place);
  });
  check();
  try {
    work.wait();
  } catch (const std::exception&) {
    if (!is_interrupted_) rethrow_explained(/*by_user=*/false);
  }
  check();
}

void Interruption::wait(c10::ivalue::Future& future) {
  if (of_this_thread != nullptr) wait(future, kForever);
  try {
    future.waitAndThrow();
  } catch (const std::exception&) {
    rethrow_explained(/*by_user=*/true);
  }
}

void Interruption::wait_outside(c10d::Work& work, const std::vector<std::shared_ptr<Interruption>>& all) {
  const auto future = awaited_future(work);
  for (const auto& interruption : all) interruption->check();
  if (future && future->devices().empty()) wait(*future, kForever, all);
  try {
    work.wait();
  } catch (const std::exception&) {
    rethrow_explained(/*by_user=*/false);
  }
}

bool Interruption::wait(c10::ivalue::Future& future, std::chrono::milliseconds patience,
                        const std::vector<std::shared_ptr<Interruption>>& others) {
  // The callback may come after this thread has stopped waiting.
  const auto done = std::make_shared<std::promise<void>>();
  const auto is_done = done->get_future();
  future.addCallback([done](c10::ivalue::Future&) { done->set_value(); });
  const auto end = std::chrono::steady_clock::now() + patience;
  while (std::chrono::steady_clock::now() < end) {
    if (is_done.wait_for(kLook) == std::future_status::ready) return true;
    if (of_this_thread != nullptr) of_this_thread->check();
    for (const auto& other : others) other->check();
  }
  return false;
}

}  // namespace fastddp
