#include "bucket.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_complex.h>

#include "kernels.h"

namespace fastddp {
namespace {

// Elements [offset, offset + parameter.numel()) of `wire` (counted in the parameter's dtype) in the layout in which
// autograd makes the parameter's gradient: its strides if it is dense and non-overlapping, else row-major
// (see "Gradient Layout Contract" in torch's accumulate_grad.h).
at::Tensor view_of(const at::Tensor& wire, const at::Tensor& parameter, int64_t offset) {
  const auto flat = parameter.is_complex() ? at::view_as_complex(wire.view({-1, 2})) : wire;
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides(), flat.storage_offset() + offset);
  }
  return flat.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

void check_gradient(const at::Tensor& gradient, const Bucket& bucket, size_t member) {
  const auto& view = bucket.views[member];
  TORCH_CHECK(!gradient.is_sparse(), "fastddp: parameter ", bucket.names[member], " in bucket ", bucket.index,
              " got a sparse gradient, which is not supported; build its module with sparse=False, or exclude it with "
              "_set_params_and_buffers_to_ignore_for_model.");
  TORCH_CHECK(gradient.sizes() == view.sizes() && gradient.device() == view.device(), "fastddp: the gradient of parameter ",
              bucket.names[member], " in bucket ", bucket.index, " has shape ", gradient.sizes(), " on ",
              gradient.device(), ", its parameter ", view.sizes(), " on ", view.device(),
              ": was the parameter replaced or moved after the model was wrapped? Wrap it after such changes.");
}

void pack_members(Bucket& bucket, const std::vector<size_t>& members, double scale) {
  bucket.producers.current_stream_waits(bucket.wire.device());
  std::vector<Slot> slots;
  slots.reserve(members.size());
  for (const auto member : members) {
    const auto& gradient = bucket.parameters[member].grad();
    if (gradient.defined()) check_gradient(gradient, bucket, member);
    slots.push_back({gradient, bucket.views[member]});
  }
  kernels_for(bucket.wire.device()).pack(slots, scale);
  for (const auto member : members) {
    bucket.packed[member] = true;
    if (bucket.gradient_as_bucket_view) bucket.parameters[member].mutable_grad() = bucket.views[member];
  }
}

}  // namespace

Bucket::Bucket(size_t index, size_t count, std::vector<size_t> members, const std::vector<at::Tensor>& all_parameters,
               const std::vector<std::string>& all_names, bool gradient_as_bucket_view)
    : index(index), count(count), members(std::move(members)), gradient_as_bucket_view(gradient_as_bucket_view) {
  int64_t numel = 0;
  for (const auto member : this->members) {
    parameters.push_back(all_parameters[member]);
    names.push_back(all_names[member]);
    numel += all_parameters[member].numel();
  }
  const auto& first = parameters.front();
  const int64_t parts = first.is_complex() ? 2 : 1;
  wire = at::empty({numel * parts}, first.options().dtype(c10::toRealValueType(first.scalar_type())));
  int64_t offset = 0;
  for (const auto& parameter : parameters) {
    views.push_back(view_of(wire, parameter, offset));
    offsets.push_back(offset * parts);
    lengths.push_back(parameter.numel() * parts);
    sizes.push_back(parameter.sizes().vec());
    if (parameter.is_complex()) sizes.back().push_back(2);
    offset += parameter.numel();
  }
  reset();
}

void Bucket::reset() {
  missing = members.size();
  packed.assign(members.size(), false);
  producers.clear();
}

void pack(Bucket& bucket, double scale) {
  std::vector<size_t> members;
  members.reserve(bucket.members.size());
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    if (!bucket.packed[member]) members.push_back(member);
  }
  pack_members(bucket, members, scale);
}

void pack_on_arrival(Bucket& bucket, size_t member, double scale) {
  if (kernels_for(bucket.wire.device()).pack_on_arrival()) pack_members(bucket, {member}, scale);
}

void unpack(Bucket& bucket, const at::Tensor& result) {
  if (bucket.gradient_as_bucket_view) {
    if (!result.is_same(bucket.wire)) bucket.wire.copy_(result);
    return;
  }
  std::vector<Slot> slots;
  slots.reserve(bucket.parameters.size());
  int64_t offset = 0;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const auto& parameter = bucket.parameters[i];
    auto& gradient = bucket.parameters[i].mutable_grad();
    if (!gradient.defined()) {
      const auto& view = bucket.views[i];
      gradient = at::empty_strided(view.sizes(), view.strides(), view.options());
    }
    // The write below goes past autograd: tell whoever saved the gradient that it changed.
    gradient.unsafeGetTensorImpl()->bump_version();
    slots.push_back({gradient, result.is_same(bucket.wire) ? bucket.views[i] : view_of(result, parameter, offset)});
    offset += parameter.numel();
  }
  kernels_for(bucket.wire.device()).unpack(slots);
}

}  // namespace fastddp
