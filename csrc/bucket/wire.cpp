#include "bucket/wire.h"

#include <algorithm>

namespace fastddp {

void Wire::set(const Layout& layout, const at::Tensor& wire) {
  drop();
  tensor_ = wire;
  for (size_t member = 0; member < layout.size(); ++member) {
    const auto& view = views_.emplace_back(layout.view(wire, member));
    // Of its own, not the wire's: a mark of one gradient shall not see writes to another (gradient_mark.h).
    view.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(0));
  }
}

void Wire::lend(const at::Tensor& alias) {
  if (!has(alias) || alias.is_same(tensor_)) return;
  std::erase_if(aliases_, [&](const auto& known) {
    return known.expired() || known._unsafe_get_target() == alias.unsafeGetTensorImpl();
  });
  aliases_.emplace_back(alias.getIntrusivePtr());
}

// Another thread may drop an alias at any moment, so references are counted before living aliases: one that goes in between looks
// like somebody's, and only costs a new wire.
bool Wire::is_held_beside(size_t known) const {
  if (is_part_) return false;
  const auto references = tensor_.storage().use_count();
  const auto living = std::ranges::count_if(aliases_, [](const auto& alias) { return !alias.expired(); });
  return references > 1 + views_.size() + static_cast<size_t>(living) + known;
}

}  // namespace fastddp
