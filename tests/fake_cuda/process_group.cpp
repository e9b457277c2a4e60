#include "process_group.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "guard.h"

namespace fake_cuda {
namespace {

using Tensors = std::vector<at::Tensor>;

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Waiting makes the current stream wait, never the host. Like NCCL's, it holds the tensors until somebody has waited.
class StreamWork : public c10d::Work {
 public:
  StreamWork(int rank, c10d::OpType type, c10::Stream stream, Tensors held, const Tensors& results)
      : Work(rank, type), event_(kType), held_(std::move(held)) {
    event_.record(stream);
    const c10::StreamGuard guard(stream);  // the future takes its events from the current stream
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{stream.device()});
    future_->markCompleted(c10::IValue(results));
  }
  bool isCompleted() override {
    return event_.query();
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    event_.block(current_stream(event_.device()));
    held_.clear();
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  c10::Event event_;
  Tensors held_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class StreamBackend : public c10d::Backend {
 public:
  StreamBackend(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : Backend(rank, size), inner_(std::move(inner)) {}

  // It stands in for NCCL, and callers key on the name.
  const std::string getBackendName() const override {
    return "nccl";
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto op = options.reduceOp;
    const bool average = op == c10d::ReduceOp::AVG;
    TORCH_CHECK(average || op == c10d::ReduceOp::SUM, "the simulated backend sums and averages only");
    return collective(c10d::OpType::ALLREDUCE, tensors, {}, [this, average](Tensors& hosts) {
      if (average) hosts[0].mul_(1.0 / getSize());
      if (inner_ == nullptr) {
        hosts[0].mul_(getSize());
      } else {
        inner_->allreduce(hosts)->wait();
      }
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return collective(c10d::OpType::BROADCAST, tensors, {}, [this, options](Tensors& hosts) {
      if (inner_ != nullptr) inner_->broadcast(hosts, options)->wait();
    });
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions&) override {
    return collective(c10d::OpType::ALLGATHER, inputs, outputs[0], [this](Tensors& hosts) {
      Tensors input{hosts[0]};
      std::vector<Tensors> gathered{Tensors(hosts.begin() + 1, hosts.end())};
      if (inner_ != nullptr) {
        inner_->allgather(gathered, input)->wait();
      } else {
        for (auto& output : gathered[0]) output.copy_(hosts[0]);
      }
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    if (inner_ != nullptr) inner_->barrier()->wait();
    Tensors nothing{at::empty({1}, at::TensorOptions().device(current_device()))};
    return collective(c10d::OpType::BARRIER, nothing, {}, [](Tensors&) {});
  }

 private:
  // Enqueues `run` on this backend's stream of the device, behind what the current stream was given.
  c10::intrusive_ptr<c10d::Work> collective(c10d::OpType type, Tensors inputs, Tensors outputs,
                                            std::function<void(Tensors&)> run) {
    const auto device = inputs.at(0).device();
    const c10::impl::VirtualGuardImpl guard(device.type());
    auto [own, is_new] = streams_.try_emplace(device.index(), guard.getDefaultStream(device));
    if (is_new) own->second = guard.getStreamFromGlobalPool(device);
    c10::Event ready(kType);
    ready.record(current_stream(device));
    ready.block(own->second);
    auto all = inputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    std::vector<std::function<at::Tensor()>> hosts;
    for (const auto& tensor : all) {
      TORCH_CHECK(tensor.device().type() == kType, "the simulated backend got a tensor on ", tensor.device());
      hosts.emplace_back([address = tensor.data_ptr(), sizes = tensor.sizes().vec(), strides = tensor.strides().vec(),
                          dtype = tensor.scalar_type()] { return at::from_blob(address, sizes, strides, dtype); });
    }
    Simulator::get().enqueue(queue_of(own->second), [hosts = std::move(hosts), run = std::move(run),
                                                     self = c10::intrusive_ptr<StreamBackend>::reclaim_copy(this)] {
      Tensors tensors;
      for (const auto& host : hosts) tensors.push_back(host());
      run(tensors);
      ++Simulator::get().collectives;
    });
    return c10::make_intrusive<StreamWork>(getRank(), type, own->second, all, outputs.empty() ? inputs : outputs);
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& inner, int rank, int size) {
  return c10::make_intrusive<StreamBackend>(inner, rank, size);
}

}  // namespace fake_cuda
