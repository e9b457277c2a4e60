// Operators without a kernel of their own: the operator on the meta device says what it returns; such tensors are made, and
// the CPU's kernel is enqueued over the same memory on the current stream. An operator whose result the host needs to go on
// (a number, a shape that depends on values) makes it wait, as on a GPU.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include "device.h"

namespace fake_cuda {
namespace {

using torch::jit::Stack;
using Arguments = c10::ArrayRef<c10::IValue>;

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> tensors;
  if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) tensors.push_back(tensor.value_or(at::Tensor()));
  }
  return tensors;
}

at::Tensor empty_like(const at::Tensor& tensor, c10::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device).requires_grad(false));
}

// What the CPU's kernel gets later. A tensor of the host is one number, or indices: it is read now, as when its value
// is an argument of a launch.
at::Tensor on_host(const at::Tensor& tensor) {
  if (on_device(tensor)) return host_view(tensor);
  auto copy = tensor.detach().clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  return on_device(tensor) ? empty_like(tensor, c10::kMeta) : tensor;
}

// Arguments for the same operator on the CPU or the meta device. A tensor that is passed twice stays one.
class Translation {
 public:
  Translation(c10::DeviceType device) : device_(device) {}

  Stack operator()(Arguments arguments) {
    Stack stack;
    for (const auto& argument : arguments) stack.push_back(value(argument));
    return stack;
  }

 private:
  c10::IValue value(const c10::IValue& value) {
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(device_);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& element : tensors_of(value)) list.push_back(tensor(element));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& element : tensors_of(value)) {
        list.push_back(element.defined() ? std::optional(tensor(element)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  at::Tensor tensor(const at::Tensor& from) {
    if (!from.defined()) return from;
    auto [known, is_new] = known_.try_emplace(from.unsafeGetTensorImpl());
    if (is_new) known->second = device_ == c10::kCPU ? on_host(from) : on_meta(from);
    return known->second;
  }

  c10::DeviceType device_;
  std::map<const c10::TensorImpl*, at::Tensor> known_;
};

bool is_indexing(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name.starts_with("aten::index") || name.starts_with("aten::_index") || name.starts_with("aten::_unsafe_index");
}

bool has_mask(Arguments arguments) {
  const auto is_mask = [](const at::Tensor& index) {
    return index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
  };
  return std::ranges::any_of(arguments, [&](const c10::IValue& argument) {
    return argument.isOptionalTensorList() && std::ranges::any_of(tensors_of(argument), is_mask);
  });
}

bool host_needs_result(const c10::OperatorHandle& op, Arguments arguments) {
  const auto is_tensor = [](const c10::Argument& value) { return value.type()->kind() == c10::TypeKind::TensorType; };
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
         (is_indexing(op) && has_mask(arguments)) || !std::ranges::all_of(op.schema().returns(), is_tensor);
}

c10::Device common_device(const c10::OperatorHandle& op, Arguments arguments) {
  std::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    if (argument.isDevice() && argument.toDevice().type() == kType) device = argument.toDevice();
  }
  for (const auto& argument : arguments) {
    for (const auto& tensor : tensors_of(argument)) {
      if (!tensor.defined()) continue;
      const bool fits = on_device(tensor) ? !device.has_value() || !device->has_index() || *device == tensor.device()
                                          : tensor.dim() == 0 || is_indexing(op);
      TORCH_CHECK(fits, op.schema().name(), ": expected all tensors on one simulated device, got one on ", tensor.device());
      if (on_device(tensor)) device = tensor.device();
    }
  }
  TORCH_CHECK(device.has_value(), "the simulated device got ", op.schema(), " without a tensor of its own");
  return device->has_index() ? *device : current_device();
}

// Kernels may use the memory of an `out` argument for something larger on the way: they get new memory each time.
void renew_outputs(const c10::OperatorHandle& op, Stack& stack) {
  for (size_t i = 0; i < stack.size(); ++i) {
    if (!op.schema().arguments()[i].is_out() || !stack[i].isTensor()) continue;
    stack[i] = at::empty({0}, stack[i].toTensor().options());
  }
}

// The argument that the return `index` is, if the operator writes to one; null if the result is new.
const c10::IValue* written_argument(const c10::OperatorHandle& op, Arguments arguments, size_t index) {
  const auto* alias = op.schema().returns()[index].alias_info();
  if (alias == nullptr) return nullptr;
  TORCH_CHECK(alias->isWrite(), "the simulated device has no kernel for the view ", op.schema());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* other = op.schema().arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return &arguments[i];
  }
  return nullptr;
}

// Puts what the operator returns in place of its arguments. What it returns of an argument that it writes to is taken from the
// argument: torch 2.11 reads several such returns through references to arguments that it has let go of.
void call(const c10::OperatorHandle& op, Stack& values) {
  const Stack arguments = values;
  op.callBoxed(values);
  for (size_t i = 0; i < values.size(); ++i) {
    if (const auto* written = written_argument(op, arguments, i)) values[i] = *written;
  }
}

// The CPU keeps the statistics of a normalisation in the dtype of the weights, and without weights in the input's; the
// meta kernel speaks of the GPU's, which is wider.
at::Tensor corrected(const c10::OperatorHandle& op, Arguments arguments, size_t index, const at::Tensor& expected) {
  static const auto* normalisations =
      new std::set<std::string>{"aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"};
  if (index == 0 || !normalisations->contains(op.schema().name()) || !expected.defined()) return expected;
  const auto weight = std::ranges::find(op.schema().arguments(), "weight", &c10::Argument::name);
  const auto& value = arguments[static_cast<size_t>(weight - op.schema().arguments().begin())];
  return expected.to((value.isTensor() ? value : arguments[0]).toTensor().scalar_type());
}

void run_later(const c10::OperatorHandle& op, Arguments arguments, c10::Device device, Stack& returned) {
  TORCH_CHECK(op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta), "the simulated device cannot run ", op.schema(),
              ": torch has no meta kernel that says what it returns. Register one in operators.cpp.");
  auto expected = Translation(c10::kMeta)(arguments);
  call(op, expected);
  std::vector<std::pair<size_t, at::Tensor>> results;  // among the returns; and where it goes
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto like = corrected(op, arguments, i, expected[i].isTensor() ? expected[i].toTensor() : at::Tensor());
    if (const auto* written = written_argument(op, arguments, i)) {
      if (written->toTensor().sizes() != like.sizes()) written->toTensor().resize_(like.sizes());
      returned.push_back(*written);
    } else {
      returned.push_back(like.defined() ? empty_like(like, device) : at::Tensor());
    }
    if (const auto& result = returned.back().toTensor(); result.defined()) results.emplace_back(i, host_view(result));
  }
  const auto body = [op, stack = Translation(c10::kCPU)(arguments), results = std::move(results)] {
    auto values = stack;
    renew_outputs(op, values);
    call(op, values);
    for (const auto& [index, view] : results) {
      const auto& value = values.at(index).toTensor();
      TORCH_CHECK(value.sizes() == view.sizes() && value.scalar_type() == view.scalar_type(), op.schema().name(), " returned ",
                  value.sizes(), " ", value.scalar_type(), " where its meta kernel said ", view.sizes(), " ",
                  view.scalar_type());
      if (value.const_data_ptr() != view.const_data_ptr()) view.copy_(value);
    }
  };
  Simulator::get().enqueue(current_queue(device.index()), {op.schema().name(), body});
}

void run_now(const c10::OperatorHandle& op, Arguments arguments, c10::Device device, Stack& returned) {
  auto& simulator = Simulator::get();
  auto& queue = current_queue(device.index());
  simulator.wait_for(simulator.last(queue), op.schema().name());
  auto values = Translation(c10::kCPU)(arguments);
  call(op, values);
  for (size_t i = 0; i < values.size(); ++i) {
    if (const auto* written = written_argument(op, arguments, i)) {
      returned.push_back(*written);
    } else if (values[i].isTensor() && values[i].toTensor().defined()) {
      const auto result = empty_like(values[i].toTensor(), device);
      const auto body = [view = host_view(result), value = values[i].toTensor()] { view.copy_(value); };
      simulator.enqueue(queue, {op.schema().name(), body});
      returned.push_back(result);
    } else {
      returned.push_back(values[i]);
    }
  }
}

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto count = op.schema().arguments().size();
  const Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  const auto device = common_device(op, arguments);
  const c10::DeviceGuard guard(device);
  Stack returned;
  (host_needs_result(op, arguments) ? run_now : run_later)(op, arguments, device, returned);
  torch::jit::drop(*stack, count);
  std::ranges::move(returned, std::back_inserter(*stack));
}

}  // namespace fake_cuda
