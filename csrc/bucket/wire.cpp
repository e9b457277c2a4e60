#include "bucket/wire.h"

namespace fastddp {

void Wire::make(const Layout& layout) {
  const auto wire = memory_ ? memory_(layout.wire_length(), layout.wire_options()) : layout.empty_wire();
  layout.zero_gaps(wire);
  set(layout, wire);
}

void Wire::make_another(const Layout& layout) {
  const auto wire = layout.empty_wire();  // note [Memory of wires]
  layout.zero_gaps(wire);
  set(layout, wire);
}

void Wire::become(const Layout& layout, const at::Tensor& wire) {
  set(layout, wire);
  is_part_ = true;
}

void Wire::set(const Layout& layout, const at::Tensor& wire) {
  drop();
  tensor_ = wire;
  for (size_t member = 0; member < layout.size(); ++member) views_.push_back(layout.view(wire, member));
}

void Wire::drop() {
  tensor_.reset();
  views_.clear();
  aliases_.clear();
  is_part_ = false;
}

void Wire::do_without() {
  drop();
  memory_ = nullptr;
  is_home_ = false;
}

const std::vector<at::Tensor>& Wire::parts(const std::function<std::vector<at::Tensor>(const at::Tensor&)>& cut) {
  if (aliases_.empty()) aliases_ = cut(tensor_);
  return aliases_;
}

bool Wire::is_held_beside(size_t known) const {
  return !is_part_ && tensor_.storage().use_count() > 1 + views_.size() + aliases_.size() + known;
}

}  // namespace fastddp
