#include "bucket/bucket.h"

#include "errors/see.h"

namespace fastddp {

void Outline::set_wire(WireFormat format, WireMemory memory, bool has_beside) {
  keeps_wire = !layout.set_format(format) && keeps_wire;
  wire = Wire::Need{format.dtype, layout.device(), layout.wire_length(), has_beside, std::move(memory)};
}

void Outline::do_without_wire(WireFormat format) {
  layout.set_format(format);
  wire.reset();
}

Bucket::Bucket(Layout layout, std::vector<at::Tensor> holders)
    : layout(std::move(layout)),
      window(this->layout.size()),
      kernels(make_kernels(this->layout.device())),
      marks(this->layout.size()),
      holders_(std::move(holders)) {
  auto outline = this->outline();
  outline.set_wire(this->layout.format());
  take(std::move(outline));
}

at::Tensor& Bucket::gradient_to_write(size_t member) {
  auto& gradient = this->gradient(member);
  if (!gradient.defined()) gradient = layout.empty_gradient(member);
  bump_version(gradient);
  return gradient;
}

void Bucket::take(Outline outline) {
  if (!outline.keeps_wire) wire.give_back();
  layout = std::move(outline.layout);
  wire.plan(std::move(outline.wire));
  shard = std::move(outline.shard);
}

void Bucket::make_wire() {
  wire.make([this](const at::Tensor& made) { return cut_up(made); });
}

void Bucket::take_another_wire() {
  wire.become(wire.another(), [this](const at::Tensor& made) { return cut_up(made); });
}

std::vector<at::Tensor> Bucket::cut_up(const at::Tensor& wire) const {
  layout.zero_gaps(wire);
  std::vector<at::Tensor> views;
  for (size_t member = 0; member < size(); ++member) views.push_back(layout.view(wire, member));
  return views;
}

void Bucket::arrive(size_t member, bool exclusive) {
  const auto& gradient = std::as_const(*this).held(member);
  check_gradient(*this, member, gradient);
  window[member] = {.final = true, .exclusive = exclusive};
  if (gradient.defined() && !wire.has(gradient)) window.beside += gradient.nbytes();
}

void check_gradient(const Bucket& bucket, size_t member, const at::Tensor& gradient) {
  if (!gradient.defined()) return;
  const auto& like = bucket.layout[member].like;
  const auto& name = bucket.layout.name(member);
  TORCH_CHECK(!gradient.is_sparse(), "fastddp: parameter ", name, " in bucket ", bucket.index(),
              " got a sparse gradient, which is not supported; build its module with sparse=False, or exclude it with "
              "_set_params_and_buffers_to_ignore_for_model.",
              see("FD009"));
  TORCH_CHECK(gradient.sizes() == like.sizes() && gradient.device() == like.device(), "fastddp: the gradient of parameter ",
              name, " in bucket ", bucket.index(), " has shape ", gradient.sizes(), " on ", gradient.device(),
              ", its parameter ", like.sizes(), " on ", like.device(),
              ": was the parameter replaced or moved after the model was wrapped? Wrap it after such "
              "changes.",
              see("FD012"));
}

}  // namespace fastddp
