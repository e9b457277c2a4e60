// Works that come late or never, and what fastddp's wait makes of them: test_interruption.py.
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <future>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "waits/interruption.h"

// Torch does not say how many calls a future has to make, and this is no access that a compiler forbids.
std::size_t calls_of(const c10::ivalue::Future& future);
template <auto callbacks>
struct Calls {
  friend std::size_t calls_of(const c10::ivalue::Future& future) { return (future.*callbacks).size(); }
};
template struct Calls<&c10::ivalue::Future::callbacks_>;

namespace {

// Of a known kind it completes its future, as collectives do. Of an unknown kind, as works that are written in Python, nobody does.
// A wait that times out breaks its connection, as one for a message does.
class LateWork : public c10d::Work {
 public:
  explicit LateWork(bool is_known) : Work(-1, is_known ? c10d::OpType::ALLREDUCE : c10d::OpType::UNKNOWN) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout == kNoTimeout) return Work::wait(timeout);
    throw std::runtime_error("the wait has broken the connection");
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void end(const std::exception_ptr& error) {
    if (retrieveOpType() != c10d::OpType::UNKNOWN) {
      if (error) {
        future_->setError(error);
      } else {
        future_->markCompleted();
      }
    }
    finish(error);
  }

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> future_ = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
};

// A wait that hangs keeps both, and its thread.
void wait_for(const c10::intrusive_ptr<c10d::Work>& work, const std::shared_ptr<fastddp::Interruption>& interruption) {
  std::packaged_task<void()> wait([work, interruption] {
    const fastddp::Interruption::Scope scope(*interruption, at::kCPU);
    fastddp::Interruption::wait(*work);
  });
  auto done = wait.get_future();
  std::thread(std::move(wait)).detach();
  if (done.wait_for(std::chrono::seconds(20)) != std::future_status::ready) throw std::runtime_error("the wait hangs");
  done.get();
}

// It ends, or fails, after `seconds`.
void wait_for_late_work(bool is_known, double seconds, bool fails) {
  const auto work = c10::make_intrusive<LateWork>(is_known);
  const std::jthread other_rank([=] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    work->end(fails ? std::make_exception_ptr(std::runtime_error("the connection is lost")) : nullptr);
  });
  wait_for(work, std::make_shared<fastddp::Interruption>());
}

void wait_for_interrupted_work() {
  const auto interruption = std::make_shared<fastddp::Interruption>();
  const std::jthread watch([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    interruption->interrupt("another rank is stopped");
  });
  wait_for(c10::make_intrusive<LateWork>(/*is_known=*/true), interruption);
}

// A message between two ranks. It comes only if it is aborted, and then it fails.
class Message : public c10d::Work {
 public:
  Message() : Work(-1, c10d::OpType::RECV) {}

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    waits_.set_value();
    aborted_.get_future().wait();
    throw std::runtime_error("the message was aborted");
  }
  void abort() override { aborted_.set_value(); }
  std::future<void> waits() { return waits_.get_future(); }

 private:
  std::promise<void> waits_, aborted_;
};

// What each of these waits, which begin one after the other, raises.
std::vector<std::string> interrupt_messages(int count) {
  const auto interruption = std::make_shared<fastddp::Interruption>();
  std::vector<std::future<std::string>> errors;
  for (int i = 0; i < count; ++i) {
    const auto message = c10::make_intrusive<Message>();
    auto waits = message->waits();
    errors.push_back(std::async(std::launch::async, [=]() -> std::string {
      try {
        wait_for(message, interruption);
      } catch (const std::exception& error) {
        return error.what();
      }
      return "";
    }));
    waits.wait();
  }
  interruption->interrupt("another rank is stopped");
  std::vector<std::string> said;
  for (auto& error : errors) said.push_back(error.get());
  return said;
}

// How many calls the future has to make when it ends, after `seconds` of a wait outside of a window.
std::size_t calls_after_a_wait(double seconds) {
  const auto work = c10::make_intrusive<LateWork>(/*is_known=*/true);
  auto calls = std::async(std::launch::async, [=] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    const auto count = calls_of(*work->getFuture());
    work->end(nullptr);
    return count;
  });
  fastddp::Interruption::wait_outside(*work, {std::make_shared<fastddp::Interruption>()});
  return calls.get();
}

// Its abort waits for those of the other groups to begin; one that cannot be aborted raises then.
class Group : public c10d::ProcessGroup {
 public:
  Group(std::latch& all, std::string error) : ProcessGroup(/*rank=*/0, /*size=*/1), all_(all), error_(std::move(error)) {}

  void abort() override {
    all_.count_down();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!all_.try_wait()) {
      if (std::chrono::steady_clock::now() > end) throw std::runtime_error("other groups are not aborted");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!error_.empty()) throw std::runtime_error(error_);
  }

 private:
  std::latch& all_;
  const std::string error_;
};

std::vector<std::string> abort_groups(const std::vector<std::string>& errors) {
  std::latch all(static_cast<std::ptrdiff_t>(errors.size()));
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  for (const auto& error : errors) groups.push_back(c10::make_intrusive<Group>(all, error));
  fastddp::Interruption interruption;
  interruption.may_abort(groups);
  return interruption.abort_groups();
}

}  // namespace

PYBIND11_MODULE(late_work, module) {
  module.def("wait_for_late_work", wait_for_late_work, pybind11::arg("is_known"), pybind11::arg("seconds"),
             pybind11::arg("fails"));
  module.def("wait_for_interrupted_work", wait_for_interrupted_work);
  module.def("interrupt", &fastddp::Interruption::interrupt, pybind11::arg("interruption"), pybind11::arg("why"));
  const pybind11::call_guard<pybind11::gil_scoped_release> no_gil;
  module.def("interrupt_messages", interrupt_messages, pybind11::arg("count"), no_gil);
  module.def("calls_after_a_wait", calls_after_a_wait, pybind11::arg("seconds"), no_gil);
  module.def("abort_groups", abort_groups, pybind11::arg("errors"), no_gil);
}
