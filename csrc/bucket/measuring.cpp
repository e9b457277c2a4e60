#include "bucket/measuring.h"

#include <utility>

#include "bucket/bucket_range.h"
#include "bucket/shard.h"

namespace fastddp {
namespace {

void measure_each(std::vector<at::Tensor>& measured, const Bucket& bucket) {
  const auto add = [&](const at::Tensor& gradient) {
    if (gradient.defined()) measured.push_back(measure_with_operators(gradient));
  };
  if (bucket.shard != nullptr) {
    for (const auto& span : bucket.shard->mine().all) add(span.like.grad());
    return;
  }
  for (size_t member = 0; member < bucket.size(); ++member) add(bucket.held(member));
}

}  // namespace

void measure_local(Bucket& bucket, Numbers members) {
  if (!bucket.local_sums) return;
  std::vector<Slot> slots;
  slots.reserve(members.size());
  for (const auto member : members) {
    const auto& gradient = bucket.gradient(member);
    if (bucket.window[member].measured || !gradient.defined()) continue;
    bucket.window[member].measured = true;
    slots.push_back({gradient, bucket.layout[member].like, member});
  }
  if (slots.empty()) return;
  const BucketRange range("measure", bucket);
  bucket.kernels->measure_gradients(slots, *bucket.local_sums, bucket.window.measurings++);
}

LocalSums* sums_of_packed(Bucket& bucket, const std::vector<Slot>& slots) {
  for (const auto& slot : slots) bucket.window[slot.member].measured = true;
  return &*bucket.local_sums;
}

const std::vector<at::Tensor>& measure(Bucket& bucket) {
  auto& [measured, unread] = bucket.window.seen;
  for (const auto& tensor : std::exchange(unread, {})) measured.push_back(bucket.kernels->measure(tensor));
  if (!measured.empty()) return measured;
  const bool are_in_wire = bucket.wire.exists() && bucket.shard == nullptr && !bucket.window.rewritten;
  if (are_in_wire) {
    measured = {bucket.kernels->measure(bucket.wire.tensor())};
  } else {
    measure_each(measured, bucket);
  }
  return measured;
}

bool has_seen_not_finite(const Bucket& bucket) {
  for (const auto& partial : bucket.window.seen.measured) {
    if (!partial.is_cpu()) continue;
    const auto* numbers = partial.const_data_ptr<double>();
    for (int64_t i = 1; i < partial.numel(); i += 2) {
      if (numbers[i] > 0) return true;
    }
  }
  return false;
}

}  // namespace fastddp
