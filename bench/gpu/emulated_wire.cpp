// A process group of which only this rank exists. Its collectives take as long as they are told to, on a stream of their
// own, and leave the result that they would have if all ranks held the same tensors.
//
// It orders streams as NCCL's process group does: a collective waits for the stream that was current when it was called,
// and Work::wait makes the current stream wait, not the host. Built on c10's device-agnostic streams; only the kernel is
// CUDA.
#include "emulated_wire.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>

namespace py = pybind11;

namespace emulated_wire {
namespace {

// How long a collective takes: a part of its own, and one for each byte.
struct Cost {
  double latency_ns;
  double ns_per_byte;

  std::uint64_t of(size_t bytes) const {
    return static_cast<std::uint64_t>(latency_ns + ns_per_byte * static_cast<double>(bytes));
  }
};

Element element_of(c10::ScalarType type) {
  switch (type) {
    case c10::kHalf:
      return Element::float16;
    case c10::kBFloat16:
      return Element::bfloat16;
    case c10::kFloat:
      return Element::float32;
    default:
      TORCH_CHECK_VALUE(false, "the emulated wire does not add up tensors of ", type);
  }
}

class EmulatedWork : public c10d::Work {
 public:
  // Made with the wire's stream current, after the collective was put on it.
  EmulatedWork(c10d::OpType type, std::vector<at::Tensor> results, const c10::Stream& stream)
      : Work(0, type),
        results_(std::move(results)),
        done_(stream.device_type()),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{stream.device()})) {
    done_.record(stream);
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override { return done_.query(); }

  bool isSuccess() const override { return true; }

  void synchronize() override {
    const auto device = future_->devices().front();
    done_.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    synchronize();
    return true;
  }

  std::vector<at::Tensor> result() override { return results_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> results_;
  c10::Event done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class EmulatedWire : public c10d::Backend {
 public:
  EmulatedWire(int rank, int size, int blocks, Cost reduction, Cost copy)
      : Backend(rank, size), blocks_(blocks), reduction_(reduction), copy_(copy) {}

  // torch's DDP asks for the name to learn how streams are ordered. Here that is as with NCCL, so a training step takes the
  // same path as on a real cluster.
  const std::string getBackendName() const override { return "nccl"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const auto operation = static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp);
    TORCH_CHECK_VALUE(operation != c10d::ReduceOp::PREMUL_SUM, "the emulated wire has no PREMUL_SUM");
    // Any other operation on equal tensors returns what they hold. An average still takes the memory traffic of a sum; a
    // greatest one is of the few bytes that a window's status has, whose dtype the kernel does not know.
    std::optional<double> factor;
    if (operation == c10d::ReduceOp::SUM) factor = getSize();
    if (operation == c10d::ReduceOp::AVG) factor = 1.0;
    return transfer(c10d::OpType::ALLREDUCE, tensors.at(0), reduction_, factor, [] {});
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) override {
    return transfer(c10d::OpType::BROADCAST, tensors.at(0), copy_, std::nullopt, [] {});
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) override {
    return transfer(c10d::OpType::ALLGATHER, inputs.at(0), copy_, std::nullopt, [&] {
      for (auto& output : outputs.at(0)) output.copy_(inputs[0]);
    });
  }

  size_t collectives() const { return collectives_; }
  size_t bytes() const { return bytes_; }
  double busy_ms() const { return static_cast<double>(busy_ns_) / 1e6; }

 private:
  // Runs `besides` and the kernel on the wire's stream. No factor: the kernel does not touch the tensor.
  template <typename Besides>
  c10::intrusive_ptr<c10d::Work> transfer(c10d::OpType type, const at::Tensor& tensor, const Cost& cost,
                                          std::optional<double> factor, const Besides& besides) {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "the emulated wire moves contiguous tensors");
    const c10::impl::VirtualGuardImpl guard(tensor.device().type());
    if (!stream_) stream_ = guard.getStreamFromGlobalPool(tensor.device());
    c10::Event ready(tensor.device().type());
    ready.record(guard.getStream(tensor.device()));
    ready.block(*stream_);

    const c10::StreamGuard on_wire(*stream_);
    besides();
    const auto nanoseconds = cost.of(tensor.nbytes());
    const auto error =
        launch_transfer(guard.getStreamNativeHandle(*stream_), blocks_, nanoseconds, tensor.data_ptr(), tensor.numel(),
                        factor ? element_of(tensor.scalar_type()) : Element::none, factor.value_or(1.0));
    TORCH_CHECK(error == 0, "the emulated wire's kernel was not launched: CUDA error ", error);
    guard.recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
    ++collectives_;
    bytes_ += tensor.nbytes();
    busy_ns_ += nanoseconds;
    return c10::make_intrusive<EmulatedWork>(type, std::vector<at::Tensor>{tensor}, *stream_);
  }

  const int blocks_;
  const Cost reduction_;
  const Cost copy_;
  std::optional<c10::Stream> stream_;
  size_t collectives_ = 0;
  size_t bytes_ = 0;
  std::uint64_t busy_ns_ = 0;
};

}  // namespace
}  // namespace emulated_wire

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using emulated_wire::Cost;
  using emulated_wire::EmulatedWire;
  py::module_::import("torch.distributed");  // it binds the base class
  py::class_<Cost>(m, "Cost").def(py::init<double, double>(), py::arg("latency_ns"), py::arg("ns_per_byte"));
  py::class_<EmulatedWire, c10d::Backend, c10::intrusive_ptr<EmulatedWire>>(m, "EmulatedWire")
      .def(py::init<int, int, int, Cost, Cost>(), py::arg("rank"), py::arg("size"), py::arg("blocks"),
           py::arg("reduction"), py::arg("copy"))
      .def_property_readonly("collectives", &EmulatedWire::collectives)
      .def_property_readonly("bytes", &EmulatedWire::bytes)
      .def_property_readonly("busy_ms", &EmulatedWire::busy_ms);
}
