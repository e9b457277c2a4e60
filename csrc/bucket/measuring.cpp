// What gradients are, before and after ranks have added them up: sums of squares, and how many elements are not finite.
#include <numeric>

#include "bucket/bucket.h"
#include "bucket/bucket_range.h"

namespace fastddp {

LocalSums* sums_of_packed(Bucket& bucket, const std::vector<Slot>& slots) {
  if (!bucket.local_sums) return nullptr;
  for (const auto& slot : slots) bucket.gradients[slot.member].measured = true;
  return &*bucket.local_sums;
}

void measure_local(Bucket& bucket, const std::vector<size_t>& members) {
  if (!bucket.local_sums) return;
  std::vector<Slot> slots;
  slots.reserve(members.size());
  for (const auto member : members) {
    const auto& gradient = bucket.gradient(member);
    if (bucket.gradients[member].measured || !gradient.defined()) continue;
    bucket.gradients[member].measured = true;
    slots.push_back({gradient, bucket.parameters[member], member});
  }
  if (slots.empty()) return;
  const BucketRange range("measure", bucket);
  bucket.kernels->measure_gradients(slots, *bucket.local_sums, bucket.measurings++);
}

void measure_local(Bucket& bucket) {
  if (!bucket.local_sums) return;
  // Orders no gradients.
  wait_for_gradients(bucket);
  std::vector<size_t> all(bucket.members.size());
  std::iota(all.begin(), all.end(), 0);
  measure_local(bucket, all);
}

const std::vector<at::Tensor>& measure(Bucket& bucket) {
  if (!bucket.wire.defined()) return measure_gradients(bucket);  // note [Lent wires]
  if (bucket.measured.empty()) bucket.measured = {bucket.kernels->measure(bucket.wire)};
  return bucket.measured;
}

const std::vector<at::Tensor>& measure_gradients(Bucket& bucket) {
  if (!bucket.measured.empty()) return bucket.measured;
  for (const auto& holder : bucket.holders) {
    if (holder.grad().defined()) bucket.measured.push_back(measure_with_operators(holder.grad()));
  }
  return bucket.measured;
}

}  // namespace fastddp
