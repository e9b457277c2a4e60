// One collective of the simulated backend, as its caller sees it.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace fake_cuda {

// The tensors of a collective, kept until somebody waited for it.
struct Stash {
  std::mutex mutex;
  std::vector<at::Tensor> tensors;

  void release() {
    std::vector<at::Tensor> released;  // freed behind the lock
    const std::lock_guard lock(mutex);
    released.swap(tensors);
  }
};

// wait() makes the current stream wait, and the host only if told so or for a barrier, and lets go of the tensors. As
// NCCL's, it refers to the results, but not to what was only read, for as long as it lives.
class StreamWork : public c10d::Work {
 public:
  // To be made when the collective has just been enqueued on `stream`.
  StreamWork(int rank, c10d::OpType type, c10::Stream stream, std::shared_ptr<Stash> stash,
             std::vector<at::Tensor> results, bool host_waits);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  c10::Stream stream_;
  c10::Event done_;
  std::shared_ptr<Stash> stash_;
  std::vector<at::Tensor> results_;
  const bool host_waits_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace fake_cuda
