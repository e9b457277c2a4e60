// Works that end as somebody's patience does, and what fastddp's wait makes of them: test_interruption.py.
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "transport/interruption.h"

namespace {

// It ends when the time of the first wait for it is over, a moment too late for that one.
class LateWork : public c10d::Work {
 public:
  explicit LateWork(std::exception_ptr error) : error_(std::move(error)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (isCompleted() || timeout == kNoTimeout) return Work::wait(timeout);
    std::this_thread::sleep_for(timeout);
    finish(error_);
    throw std::runtime_error("Operation timed out!");
  }

 private:
  const std::exception_ptr error_;
};

// As works that are written in Python: nobody can ask whether it has ended.
class BrokenWork : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { throw std::runtime_error("the connection is lost"); }
};

void wait_for(c10d::Work& work) {
  fastddp::Interruption interruption;
  const fastddp::Interruption::Scope scope(interruption, at::kCPU);
  fastddp::Interruption::wait(work);
}

void wait_for_late_work(bool fails) {
  LateWork work(fails ? std::make_exception_ptr(std::runtime_error("the connection is lost")) : nullptr);
  wait_for(work);
}

// Its abort waits for those of the other groups to begin; one that cannot be aborted raises then.
class Group : public c10d::ProcessGroup {
 public:
  Group(std::latch& all, std::string error)
      : ProcessGroup(/*rank=*/0, /*size=*/1), all_(all), error_(std::move(error)) {}

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
  module.def("wait_for_late_work", wait_for_late_work, pybind11::arg("fails"));
  module.def("wait_for_broken_work", [] {
    BrokenWork work;
    wait_for(work);
  });
  module.def("abort_groups", abort_groups, pybind11::arg("errors"),
             pybind11::call_guard<pybind11::gil_scoped_release>());
}
