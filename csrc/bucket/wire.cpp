#include "bucket/wire.h"

#include <algorithm>
#include <utility>

#include "device/huge_pages.h"

namespace fastddp {

void Wire::plan(std::optional<Need> need) {
  if (need_ != need) give_back();
  need_ = std::move(need);
}

void Wire::make(const CutUp& cut_up) {
  const auto options = at::TensorOptions().dtype(need_->dtype).device(need_->device);
  const auto memory = [&] { return need_->memory ? need_->memory(need_->elements, options) : another(); };
  const auto tensor = memory(), sum = need_->has_beside ? memory() : tensor;
  become(tensor, cut_up);
  sum_ = sum;
}

at::Tensor Wire::another() const {
  return empty_in_huge_pages(need_->elements, at::TensorOptions().dtype(need_->dtype).device(need_->device));
}

void Wire::become(const at::Tensor& tensor, const CutUp& cut_up) {
  auto parts_of_it = cut_up ? cut_up(tensor) : std::vector<at::Tensor>();
  give_back();
  tensor_ = sum_ = tensor;
  parts = std::move(parts_of_it);
}

void Wire::give_back() {
  tensor_.reset();
  sum_.reset();
  parts.clear();
  aliases_.clear();
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
  const auto references = tensor_.storage().use_count();
  const auto living = std::ranges::count_if(aliases_, [](const auto& alias) { return !alias.expired(); });
  return references > 1 + parts.size() + static_cast<size_t>(living) + known;
}

}  // namespace fastddp
