#include "stream_work.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "guard.h"

namespace fake_cuda {

StreamWork::StreamWork(int rank, c10d::OpType type, c10::Stream stream, std::shared_ptr<Stash> stash,
                       std::vector<at::Tensor> results, bool host_waits)
    : Work(rank, type),
      stream_(stream),
      done_(kType),
      stash_(std::move(stash)),
      results_(std::move(results)),
      host_waits_(host_waits || type == c10d::OpType::BARRIER) {
  done_.record(stream_);
  const c10::StreamGuard guard(stream_);  // the future takes its event from the current stream
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{stream_.device()});
  future_->markCompleted(c10::IValue(results_));
}

bool StreamWork::isCompleted() {
  return done_.query();
}

bool StreamWork::isSuccess() const {
  return true;
}

bool StreamWork::wait(std::chrono::milliseconds) {
  const auto current = c10::impl::VirtualGuardImpl(kType).getStream(stream_.device());
  if (current != stream_) done_.block(current);
  if (host_waits_ && !done_.query()) done_.synchronize();
  stash_->release();
  return true;
}

void StreamWork::synchronize() {
  wait(kNoTimeout);
}

std::vector<at::Tensor> StreamWork::result() {
  return results_;
}

c10::intrusive_ptr<c10::ivalue::Future> StreamWork::getFuture() {
  return future_;
}

}  // namespace fake_cuda
