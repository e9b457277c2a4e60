// Works that end as somebody's patience does, and what fastddp's wait makes of them: test_interruption.py.
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <stdexcept>
#include <thread>

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

void wait_for_broken_work() {
  BrokenWork work;
  wait_for(work);
}

}  // namespace

PYBIND11_MODULE(late_work, module) {
  module.def("wait_for_late_work", wait_for_late_work, pybind11::arg("fails"));
  module.def("wait_for_broken_work", wait_for_broken_work);
}
