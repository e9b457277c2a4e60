#include "bucket/placeholders.h"

#include <ATen/ops/add.h>
#include <ATen/ops/sub.h>

#include "bucket/shard.h"

namespace fastddp {

void use_placeholder(Bucket& bucket, size_t member, bool counts) {
  Shard::take_notice(bucket, member);
  auto& gradient = bucket.held(member);
  check_gradient(bucket, member, gradient);
  auto& state = bucket.window[member];
  state.may_be_dropped = true;
  auto& placeholder = state.placeholder.emplace();
  placeholder.was_empty = !gradient.defined();
  if (placeholder.was_empty) return;
  auto copy = bucket.layout.empty_gradient(member).copy_(gradient);
  placeholder.before = copy.clone();
  bucket.window.producers.note(bucket.device());
  if (!bucket.wire.has(gradient)) {
    placeholder.gradient = counts ? std::move(copy) : copy.zero_();
    return;
  }
  // A collective would write to the gradient, so it leaves the wire. It stays the same tensor.
  placeholder.gradient = as_gradient(bucket.wire.parts[member]);
  take_memory_of(gradient, copy);
  if (!counts) placeholder.gradient.zero_();
}

void note_unexpected(Bucket& bucket, size_t member, const at::Tensor& incoming) {
  auto& state = bucket.window[member];
  if (!state.has_placeholder() || state.placeholder->was_empty) return;
  auto& unexpected = state.placeholder->unexpected;
  if (!incoming.defined()) return void(unexpected = at::sub(bucket.held(member), state.placeholder->before));
  const auto gradient = incoming.to(bucket.layout.form().dtype_of(bucket.layout[member].like));
  unexpected = unexpected.defined() ? at::add(unexpected, gradient) : gradient;
}

at::Tensor left_out(const Bucket& bucket, size_t member) {
  const auto& state = bucket.window[member];
  if (!state.has_placeholder()) return {};
  return state.placeholder->was_empty ? bucket.held(member) : state.placeholder->unexpected;
}

void resolve_placeholder(Bucket& bucket, size_t member, bool used) {
  auto& placeholder = *bucket.window[member].placeholder;
  placeholder.is_over = true;
  if (auto* shard = bucket.shard.get()) return used ? shard->finish(bucket, member) : shard->restore(bucket, member);
  if (!used) return bucket.window.note_rewritten();
  auto& gradient = bucket.held(member);
  if (!gradient.defined()) gradient = bucket.layout.empty_gradient(member);
  about_to_write(gradient);
  if (placeholder.gradient.defined()) {
    gradient.copy_(placeholder.gradient);
  } else {
    gradient.zero_();  // nothing has come back: an exchange over this rank alone
  }
}

void add_late(Bucket& bucket, size_t member, const Bucket& late, size_t from) {
  if (bucket.shard != nullptr) {
    const auto whole = late.wire.tensor().narrow(0, late.layout[from].offset, late.layout[from].length());
    return bucket.shard->add(bucket, member, whole);
  }
  bucket.window.note_rewritten();
  about_to_write(bucket.held(member)).add_(late.wire.parts[from]);
}

}  // namespace fastddp
