#include "module.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <limits>
#include <thread>

#include "device.h"
#include "peers.h"

namespace fake_cuda {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// ----------------------------------------------------------------------------------------- a collective, as callers see it

// The tensors of a collective, kept until somebody waited for it.
struct Stash {
  std::mutex mutex;
  Tensors tensors;

  void release() {
    Tensors released;  // freed after unlocking
    const std::lock_guard lock(mutex);
    released.swap(tensors);
  }
};

// wait() makes the current stream wait, and the host only if told so, and lets go of the tensors. As NCCL's, it refers to
// the results, but not to what was only read, for as long as it lives.
class StreamWork : public c10d::Work {
 public:
  // To be made when the collective has just been enqueued on `stream`.
  StreamWork(int rank, c10d::OpType type, c10::Stream stream, std::shared_ptr<Stash> stash, Tensors results, bool host_waits)
      : Work(rank, type),
        stream_(stream),
        done_(kType),
        stash_(std::move(stash)),
        results_(std::move(results)),
        host_waits_(host_waits) {
    done_.record(stream_);
    const c10::StreamGuard guard(stream_);  // the future takes its event from the current stream
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{stream_.device()});
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override { return done_.query(); }
  bool wait(std::chrono::milliseconds) override {
    const auto current = c10::impl::VirtualGuardImpl(kType).getStream(stream_.device());
    if (current != stream_) done_.block(current);
    if (host_waits_ && !done_.query()) done_.synchronize();
    stash_->release();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::Stream stream_;
  c10::Event done_;
  std::shared_ptr<Stash> stash_;
  Tensors results_;
  const bool host_waits_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// ------------------------------------------------------------------------------------------ what collectives do to tensors

// One rank's part in a collective, on the host. `inner` null: all ranks hold the same.
struct Part {
  BackendPtr inner;
  int rank, size;
  Tensors inputs, outputs;
};
using Body = std::function<void(Part)>;

// Of the group whose collective runs on this thread.
thread_local const Peers* current_peers = nullptr;

// A group that is gone ends what its collectives wait for, as an aborted communicator. What the inner group holds stays there.
void wait_for_others(const WorkPtr& work) {
  while (current_peers != nullptr && !work->isCompleted()) {
    if (current_peers->stopped()) {
      static_cast<void>(new WorkPtr(work));
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  work->wait();
}

// NCCL's average multiplies what each rank sends, in the tensor's dtype, before it adds.
void sum_or_average(const Part& part, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const bool average = op == c10d::ReduceOp::AVG;
  if (part.inner != nullptr) {
    Tensors tensors{tensor};
    if (average) tensor.mul_(1.0 / part.size);
    c10d::AllreduceOptions options;
    if (!average) options.reduceOp = op;
    wait_for_others(part.inner->allreduce(tensors, options));
  } else if (op == c10d::ReduceOp::SUM) {
    tensor.mul_(part.size);
  }
}

void gather_into(const Part& part, const Tensors& to) {
  Tensors sent{part.inputs[0].clone()};
  std::vector<Tensors> gathered{{}};
  for (const auto& view : to) gathered[0].push_back(sent[0].clone().view_as(view));
  if (part.inner != nullptr) part.inner->allgather(gathered, sent)->wait();
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(gathered[0][i]);
}

// Memory that groups offer.
struct OwnMemory {
  std::mutex mutex;
  bool is_offered = false;
  std::vector<std::pair<uintptr_t, size_t>> asked_for;
};

OwnMemory& own_memory() {
  static auto& memory = *new OwnMemory;  // never destroyed, as the simulator
  return memory;
}

auto with_own_memory(const auto& use) {
  auto& memory = own_memory();
  const std::lock_guard lock(memory.mutex);
  return use(memory);
}

class StreamBackend : public c10d::Backend {
 public:
  StreamBackend(BackendPtr inner, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::string name,
                bool host_waits)
      : Backend(rank, size), inner_(std::move(inner)), name_(std::move(name)), host_waits_(host_waits) {
    if (inner_ == nullptr) return;
    peers_ = std::make_shared<Peers>(store);
    peers_->start();
  }
  ~StreamBackend() override { shutdown(); }

  const std::string getBackendName() const override { return name_; }

  void shutdown() final {
    if (peers_ != nullptr) peers_->stop();
  }
  void abort() override { shutdown(); }

  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return with_own_memory([](const OwnMemory& memory) { return memory.is_offered; });
  }

  // As NCCL's: of the allocator of the device, which knows streams. A communicator comes with the first collective.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    check_no_capture("memory is registered");
    TORCH_CHECK_WITH(DistBackendError, collectives_ > 0, "nothing has travelled yet: there is no communicator");
    const auto tensor = at::empty({size}, options);
    with_own_memory([&](OwnMemory& memory) {
      memory.asked_for.emplace_back(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), tensor.nbytes());
    });
    return tensor;
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto op = options.reduceOp;
    const auto* const name = op == c10d::ReduceOp::AVG ? "AVERAGE" : "ALLREDUCE";
    return collective(c10d::OpType::ALLREDUCE, name, options.asyncOp, {}, tensors,
                      [op](const Part& part) { sum_or_average(part, part.outputs[0], op); });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return collective(c10d::OpType::BROADCAST, "BROADCAST", options.asyncOp, {}, tensors, [options](Part part) {
      if (part.inner != nullptr) part.inner->broadcast(part.outputs, options)->wait();
    });
  }

  // What the others hold afterwards is not said: here it is NaN.
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return collective(c10d::OpType::REDUCE, "REDUCE", options.asyncOp, {}, tensors, [options](const Part& part) {
      sum_or_average(part, part.outputs[0], options.reduceOp);
      const bool is_root = part.rank == options.rootRank || part.inner == nullptr;
      if (!is_root) part.outputs[0].fill_(std::numeric_limits<double>::quiet_NaN());
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return collective(c10d::OpType::ALLGATHER, "ALLGATHER", options.asyncOp, inputs, outputs.at(0),
                      [](const Part& part) { gather_into(part, part.outputs); });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return collective(c10d::OpType::_ALLGATHER_BASE, "_ALLGATHER_BASE", options.asyncOp, {input}, {output},
                      [](const Part& part) { gather_into(part, part.outputs[0].view(-1).tensor_split(part.size)); });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return collective(c10d::OpType::_REDUCE_SCATTER_BASE, "_REDUCE_SCATTER_BASE", options.asyncOp, {input}, {output},
                      [op = options.reduceOp](const Part& part) {
                        const auto all = part.inputs[0].clone();
                        sum_or_average(part, all, op);
                        part.outputs[0].view(-1).copy_(all.view(-1).tensor_split(part.size)[part.rank]);
                      });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    const auto sizes_of = [](const at::Tensor& all, const std::vector<int64_t>& sizes, int64_t ranks) {
      return sizes.empty() ? std::vector<int64_t>(ranks, all.numel() / ranks) : sizes;
    };
    return collective(c10d::OpType::ALLTOALL_BASE, "ALLTOALL_BASE", options.asyncOp, {input}, {output},
                      [received_sizes = output_sizes, sent_sizes = input_sizes, sizes_of](const Part& part) {
                        auto sent = part.inputs[0].clone(), received = at::empty_like(part.outputs[0]);
                        if (part.inner != nullptr) {
                          auto to = received_sizes, from = sent_sizes;
                          part.inner->alltoall_base(received, sent, to, from, {})->wait();
                        } else {  // all ranks send the same
                          const auto parts = sent.split_with_sizes(sizes_of(sent, sent_sizes, part.size));
                          received = parts[part.rank].repeat({part.size}).view(received.sizes());
                        }
                        part.outputs[0].copy_(received);
                      });
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    const auto token = at::zeros({1}, at::TensorOptions().device(current_device()));
    return collective(c10d::OpType::BARRIER, "BARRIER", /*asynchronous=*/true, {}, {token},
                      [](const Part& part) { sum_or_average(part, part.outputs[0], c10d::ReduceOp::SUM); });
  }

 private:
  static Tensors host_views(const Tensors& tensors) {
    Tensors views;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(on_device(tensor), "the simulated backend got a tensor on ", tensor.device());
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "tensors of collectives must be contiguous");
      views.push_back(host_view(tensor));
    }
    return views;
  }

  // Enqueues `body` on this backend's own stream of the device, after what the current stream was given; or, if the
  // caller is going to wait at once, on the current stream itself.
  WorkPtr collective(c10d::OpType type, const char* name, bool asynchronous, const Tensors& inputs, const Tensors& results,
                     const Body& body) {
    TORCH_CHECK(type == c10d::OpType::ALLGATHER || results.size() == 1, "a collective is of one tensor here");
    release_shelf();
    const auto device = results.at(0).device();
    const auto current = c10::impl::VirtualGuardImpl(kType).getStream(device);
    const auto stream = asynchronous ? own_stream(device) : current;
    if (stream != current) {
      c10::Event ready(kType);
      ready.record(current);
      ready.block(stream);
    }
    auto stash = std::make_shared<Stash>();
    stash->tensors = inputs;
    stash->tensors.insert(stash->tensors.end(), results.begin(), results.end());
    const Part part{inner_, getRank(), getSize(), host_views(inputs), host_views(results)};
    auto run = [part, peers = peers_, body] {
      // A group that is gone moves nothing, as an aborted communicator.
      if (peers != nullptr && peers->stopped()) return;
      current_peers = peers.get();
      body(part);
    };
    // All collectives of a communicator run in the order in which they were started, whatever their streams.
    const std::lock_guard lock(mutex_);
    const auto op = Simulator::get().enqueue(queue_of(stream), {name, std::move(run), {last_}, /*collective=*/true, peers_});
    if (queue_of(stream).capture == nullptr) {
      last_ = op;
      shelf_.emplace_back(op, stash);
    }
    ++collectives_;
    const bool host_waits = host_waits_ || type == c10d::OpType::BARRIER;
    return c10::make_intrusive<StreamWork>(getRank(), type, stream, stash, results, host_waits);
  }

  c10::Stream own_stream(c10::Device device) {
    const std::lock_guard lock(mutex_);
    if (!streams_.contains(device.index())) {
      streams_.emplace(device.index(), c10::impl::VirtualGuardImpl(kType).getStreamFromGlobalPool(device));
    }
    return streams_.at(device.index());
  }

  // The tensors of a collective that nobody waited for are kept until it has run and the next one starts.
  void release_shelf() {
    std::vector<std::pair<OpPtr, std::shared_ptr<Stash>>> released;
    const std::lock_guard lock(mutex_);
    const auto done = [](const auto& kept) { return kept.first->done.load(); };
    std::ranges::copy_if(shelf_, std::back_inserter(released), done);
    std::erase_if(shelf_, done);
  }

  const BackendPtr inner_;
  const std::string name_;
  const bool host_waits_;
  std::shared_ptr<Peers> peers_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  OpPtr last_;
  std::vector<std::pair<OpPtr, std::shared_ptr<Stash>>> shelf_;
  uint64_t collectives_ = 0;
};

}  // namespace

void offer_memory(bool offered) {
  with_own_memory([&](OwnMemory& memory) {
    memory.is_offered = offered;
    memory.asked_for.clear();
  });
}

std::vector<std::pair<uintptr_t, size_t>> memory_asked_for() {
  return with_own_memory([](const OwnMemory& memory) { return memory.asked_for; });
}

c10::intrusive_ptr<c10d::Backend> make_backend(const BackendPtr& inner, const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                               int size, const std::string& name, bool host_waits) {
  return c10::make_intrusive<StreamBackend>(inner, store, rank, size, name, host_waits);
}

}  // namespace fake_cuda
