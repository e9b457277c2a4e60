// Sums of squares, and counts of what is not finite, of gradients before and after ranks have added them up.
#include <numeric>

#include "bucket/bucket.h"
#include "bucket/bucket_range.h"

namespace fastddp {

void Bucket::measure_local(const std::vector<size_t>& members) {
  if (!local_sums) return;
  std::vector<Slot> slots;
  slots.reserve(members.size());
  for (const auto member : members) {
    const auto& gradient = this->gradient(member);
    if (window[member].measured || !gradient.defined()) continue;
    window[member].measured = true;
    slots.push_back({gradient, layout[member].like, member});
  }
  if (slots.empty()) return;
  const BucketRange range("measure", *this);
  kernels->measure_gradients(slots, *local_sums, window.measurings++);
}

void Bucket::measure_local() {
  if (!local_sums) return;
  wait_for_gradients();
  std::vector<size_t> all(size());
  std::iota(all.begin(), all.end(), 0);
  measure_local(all);
}

const std::vector<at::Tensor>& Bucket::measure_gradients() {
  auto& measured = window.measured;
  if (!measured.empty()) return measured;
  for (size_t member = 0; member < size(); ++member) {
    if (held(member).defined()) measured.push_back(measure_with_operators(held(member)));
  }
  return measured;
}

}  // namespace fastddp
