// torch's operators on the simulated device: each is enqueued on the current stream, and computed by the CPU's kernel on
// the same memory when its turn comes.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <cstring>

#include "guard.h"
#include "memory.h"

namespace fake_cuda {
namespace {

using torch::jit::Stack;

// A tensor's memory without the tensor.
struct Place {
  void* address;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  c10::ScalarType dtype;
  bool conjugated;
  bool negated;

  explicit Place(const at::Tensor& tensor)
      : address(tensor.data_ptr()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        conjugated(tensor.is_conj()),
        negated(tensor.is_neg()) {}

  at::Tensor on_cpu() const {
    auto tensor = at::from_blob(address, sizes, strides, at::TensorOptions().dtype(dtype));
    if (conjugated) tensor = tensor.conj();
    return negated ? tensor._neg_view() : tensor;
  }
};

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

c10::DeviceIndex common_device(c10::ArrayRef<c10::IValue> arguments) {
  auto device = current_device().index();
  for (const auto& argument : arguments) {
    if (argument.isTensor() && on_device(argument.toTensor())) return argument.toTensor().device().index();
    if (argument.isDevice() && argument.toDevice().has_index()) device = argument.toDevice().index();
  }
  return device;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).requires_grad(false));
}

// Applies `convert` to each tensor of the device in an argument, lists included, and puts `device` for its device.
template <typename Convert>
c10::IValue converted(const c10::IValue& argument, c10::Device device, Convert convert) {
  const auto one = [&](const at::Tensor& tensor) { return on_device(tensor) ? convert(tensor) : tensor; };
  if (argument.isTensor()) return one(argument.toTensor());
  if (argument.isDevice()) return argument.toDevice().type() == kType ? c10::IValue(device) : argument;
  if (argument.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor tensor : argument.toTensorList()) list.push_back(one(tensor));
    return list;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : argument.toOptionalTensorList()) {
      list.push_back(tensor.has_value() ? std::optional(one(*tensor)) : std::nullopt);
    }
    return list;
  }
  return argument;
}

// What the operator would return: tensors without memory.
Stack infer(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  Stack stack;
  for (const auto& argument : arguments) stack.push_back(converted(argument, c10::Device(c10::kMeta), meta_of));
  op.callBoxed(stack);
  return stack;
}

// The argument that return number `index` is, if the operator writes to one; -1 if the result is new.
int64_t written_argument(const c10::FunctionSchema& schema, size_t index) {
  const auto* alias = schema.returns()[index].alias_info();
  if (alias == nullptr || !alias->isWrite()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return static_cast<int64_t>(i);
  }
  return -1;
}

at::Tensor allocate_like(const at::Tensor& meta, c10::DeviceIndex device) {
  if (!meta.defined()) return meta;
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(c10::Device(kType, device)));
}

struct Result {
  size_t index;  // among the returns
  Place place;
};

// What runs later: the operator on CPU tensors over the same memory.
std::function<void()> deferred(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                               std::vector<Result> results) {
  // Places in the order in which the arguments mention them.
  std::vector<Place> places;
  Stack templates;
  for (const auto& argument : arguments) {
    templates.push_back(converted(argument, c10::Device(c10::kCPU), [&](const at::Tensor& tensor) {
      places.emplace_back(tensor);
      return meta_of(tensor);
    }));
  }
  return [op, templates = std::move(templates), places = std::move(places), results = std::move(results)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    size_t next = 0;
    const auto fill = [&](const at::Tensor& tensor) { return tensor.is_meta() ? places[next++].on_cpu() : tensor; };
    Stack stack;
    for (const auto& value : templates) {
      if (value.isTensor()) {
        stack.push_back(value.toTensor().defined() ? fill(value.toTensor()) : value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor tensor : value.toTensorList()) list.push_back(fill(tensor));
        stack.push_back(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
          list.push_back(tensor.has_value() ? std::optional(fill(*tensor)) : std::nullopt);
        }
        stack.push_back(list);
      } else {
        stack.push_back(value);
      }
    }
    op.callBoxed(stack);
    for (const auto& result : results) result.place.on_cpu().copy_(stack.at(result.index).toTensor());
  };
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  const auto device = common_device(arguments);
  const auto inferred = infer(op, arguments);
  Stack returned;
  std::vector<Result> results;
  for (size_t i = 0; i < inferred.size(); ++i) {
    const auto written = written_argument(schema, i);
    TORCH_CHECK(written >= 0 || schema.returns()[i].alias_info() == nullptr, "the simulated device has no ", schema,
                ": a view has to be registered");
    if (written >= 0) {
      const auto& argument = arguments[static_cast<size_t>(written)];
      if (argument.isTensor() && inferred[i].isTensor()) argument.toTensor().resize_(inferred[i].toTensor().sizes());
      returned.push_back(argument);
    } else {
      TORCH_CHECK(inferred[i].isTensor(), "the simulated device cannot run ", schema, ": it returns no plain tensor");
      const auto tensor = allocate_like(inferred[i].toTensor(), device);
      if (tensor.defined()) results.push_back({i, Place(tensor)});
      returned.push_back(tensor);
    }
  }
  Simulator::get().enqueue(current_queue(device), deferred(op, arguments, std::move(results)));
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), returned.begin(), returned.end());
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() == size) return self;
  tensor->set_sizes_contiguous(size);
  const auto bytes = static_cast<size_t>(self.numel() + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) {
    auto* storage = self.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(device_allocator()->allocate(bytes));
    storage->set_nbytes(bytes);
  }
  return self;
}

// To the device. Pageable memory is read before the call returns, pinned memory when the copy runs.
void copy_in(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  auto& simulator = Simulator::get();
  auto& queue = current_queue(destination.device().index());
  const Place target(destination);
  ++simulator.copies;
  if (non_blocking && is_pinned(source.const_data_ptr())) {
    const auto op = simulator.enqueue(queue, [from = Place(source), target] { target.on_cpu().copy_(from.on_cpu()); });
    record_pinned_use(source.const_data_ptr(), op);
    return;
  }
  simulator.enqueue(queue, [snapshot = source.detach().clone(), target] { target.on_cpu().copy_(snapshot); });
}

// From the device: the host waits, except for a pinned destination that it is not going to read yet.
void copy_out(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  auto& simulator = Simulator::get();
  const bool returns_at_once = non_blocking && is_pinned(destination.const_data_ptr());
  constexpr auto what = "a copy to the host";
  // Before anything is enqueued that would write to memory of a caller who got an exception.
  if (!returns_at_once) simulator.check_wait(what);
  const auto op =
      simulator.enqueue(current_queue(source.device().index()),
                        [from = Place(source), to = Place(destination)] { to.on_cpu().copy_(from.on_cpu()); });
  if (returns_at_once) {
    record_pinned_use(destination.const_data_ptr(), op);
  } else {
    simulator.wait_for(op, what);
  }
}

// Between two devices, as in torch, the copy is ordered with the current streams of both.
void copy_within(const at::Tensor& source, const at::Tensor& destination) {
  auto& simulator = Simulator::get();
  auto& from_queue = current_queue(source.device().index());
  auto& to_queue = current_queue(destination.device().index());
  const auto op = simulator.enqueue(
      from_queue, [from = Place(source), to = Place(destination)] { to.on_cpu().copy_(from.on_cpu()); },
      &from_queue == &to_queue ? std::vector<OpPtr>() : std::vector<OpPtr>{to_queue.last});
  if (&from_queue != &to_queue) simulator.enqueue(to_queue, {}, {op});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (self.numel() == 0) return destination;
  const auto source = self.expand_as(destination);
  if (!on_device(source)) {
    copy_in(source, destination, non_blocking);
  } else if (!on_device(destination)) {
    copy_out(source, destination, non_blocking);
  } else {
    copy_within(source, destination);
  }
  return destination;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const auto on_host = at::empty({}, self.options().device(c10::kCPU));
  copy_from(self, on_host, false);
  return on_host.item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr().get(), queue_of(stream));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

// Copies do both on the way.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace fake_cuda
