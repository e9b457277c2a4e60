#include "device/launcher.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>

namespace fastddp {

void Launcher::write(const LoadedKernel& kernel, const at::Tensor& target, std::vector<int64_t> words) const {
  int64_t count = std::ssize(words);
  words.resize(static_cast<size_t>(kernel.tile.at(0)));
  const void *address = word_of(target), *scratch = nullptr;
  std::vector<void*> parameters{&address, &count};
  for (auto& word : words) parameters.push_back(&word);
  TORCH_INTERNAL_ASSERT(parameters.size() == kernel.parameters);
  parameters.insert(parameters.end(), kMostScratch, &scratch);
  driver_.launch(kernel.function, 1, device_, parameters.data());
}

at::Tensor Launcher::empty(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(device_);
  if (purpose_ == Purpose::training) return at::empty(sizes, options);
  constexpr int64_t guard = 64;  // elements on each side
  const auto count = c10::multiply_integers(sizes);
  const auto whole = at::full({count + 2 * guard}, kAround, options);
  around_.insert(around_.end(), {whole.narrow(0, 0, guard), whole.narrow(0, guard + count, guard)});
  const auto inside = whole.narrow(0, guard, count);
  return inside.fill_(std::numeric_limits<double>::quiet_NaN()).view(sizes);
}

at::Tensor Launcher::instead_of(const at::Tensor& rows) {
  return purpose_ == Purpose::training ? rows : empty(rows.sizes(), rows.scalar_type());
}

void Launcher::move(const at::Tensor& written, const at::Tensor& rows) {
  if (!written.is_same(rows)) rows.copy_(written);
}

bool Launcher::wrote_around() const {
  const auto is_untouched = [](const at::Tensor& memory) { return memory.eq(kAround).all().item<bool>(); };
  return !std::ranges::all_of(around_, is_untouched);
}

}  // namespace fastddp
