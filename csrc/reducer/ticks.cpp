#include "reducer/ticks.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "bucket/own_shard.h"

namespace fastddp {

Ticks::Ticks(Buckets& buckets, Timeline& timeline, std::shared_ptr<Exchange> exchange, std::function<void(Bucket&)> on_finished)
    : buckets_(buckets), timeline_(timeline), exchange_(std::move(exchange)), on_finished_(std::move(on_finished)) {}

void Ticks::tick() {
  const Timeline::Wait waits(timeline_, exchange_->runs_user_code() ? What::hook : What::tick, ticks_);
  const auto lag = exchange_->lag();
  const bool begins = ticks_ < buckets_.size();
  if (begins) timeline_.happened(What::starts, ticks_, *exchange_);
  exchange_->tick(ticks_);
  if (begins) timeline_.happened(What::started, ticks_, *exchange_);
  if (ticks_ >= lag) {
    const auto call = timeline_.when_arrived(ticks_ - lag);
    if (call) exchange_->when_arrived(buckets_[ticks_ - lag], call);
  }
  ++ticks_;
  finish_arrived();
}

// Gradients left in place are written only when backward has ended. Note [Gradients left in place], reduction.h.
void Ticks::finish_arrived() {
  const auto fully_started = ticks_ - std::min(ticks_, exchange_->lag());
  while (finished_ < fully_started) {
    const auto& bucket = buckets_[finished_];
    if (bucket.window.left_in_place || !exchange_->arrived(bucket)) return;
    finish_next();
  }
}

void Ticks::finish_next() {
  const auto on_side_streams = buckets_.side_streams().make_current();
  auto& bucket = buckets_[finished_++];
  exchange_->finish(bucket);
  timeline_.happened(What::finished, bucket.index());
  bucket.note_use_of_wire(bucket.wire.tensor());
  on_finished_(bucket);
}

void Ticks::finish_all() {
  while (finished_ < buckets_.size()) {
    timeline_.happened(What::finish, finished_);
    finish_next();
  }
}

void Ticks::join_current_streams() {
  buckets_.side_streams().current_streams_wait();
  for (auto& bucket : buckets_.all()) {
    bucket.window.kept.release_after_join();
    keep_for_current_stream(bucket.wire.tensor());
  }
}

// Collectives in flight on a device go on using the wires, whose memory is about to be freed. (On the CPU, works hold what they
// use.)
void Ticks::leave_behind() {
  exchange_->drain();
  for (const auto& bucket : buckets_.all()) keep_for_current_stream(bucket.wire.tensor());
}

at::Tensor Ticks::measure(const Window& window) {
  TORCH_CHECK(window.is(WindowState::finished),
              "fastddp: the norm of gradients is known between the backward that synchronises them and the next forward, "
              "not while the window is ",
              to_string(window.state()), ".");
  const c10::AutoGradMode no_grad(false);
  const auto device = buckets_.device();
  std::vector<at::Tensor> pairs{at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device))};
  for (auto& bucket : buckets_.all()) {
    for (const auto& measured : bucket.window.rewritten ? bucket.measure_gradients() : exchange_->measure(bucket)) {
      keep_for_current_stream(measured);
      pairs.push_back(add_up(measured).to(device));
    }
  }
  for (const auto parameter : buckets_.sparse()) {
    const auto& gradient = buckets_.gradient(parameter);
    if (gradient.defined()) pairs.push_back(add_up(measure_with_operators(gradient.values())).to(device));
  }
  return at::stack(pairs).sum(0);
}

bool Ticks::has_written_not_finite() const {
  for (const auto& bucket : buckets_.all()) {
    for (const auto& measured : bucket.shard == nullptr ? bucket.window.measured : bucket.shard->spans.window.measured) {
      if (!measured.is_cpu()) continue;
      const auto* numbers = measured.const_data_ptr<double>();
      for (int64_t i = 1; i < measured.numel(); i += 2) {
        if (numbers[i] > 0) return true;
      }
    }
  }
  return false;
}

// Nothing in flight may write to wires once the next window uses them. Gradients are zeroed too: something in flight may have
// written to them after the caller had set them to zero.
void Ticks::void_what_was_done() {
  {
    const auto on_side_streams = buckets_.side_streams().make_current();
    exchange_->drain();
  }
  // Of a window that failed.
  buckets_.side_streams().synchronize();
  for (auto& bucket : buckets_.all()) bucket.zero_wire();
  for (size_t index = 0; index < finished_; ++index) {
    auto& bucket = buckets_[index];
    if (!has_streams(bucket.device())) continue;  // the host had written them before the exception
    for (size_t member = 0; member < bucket.size(); ++member) {
      const auto& gradient = bucket.held(member);
      if (gradient.defined() && !bucket.window[member].in_wire) about_to_write(gradient).zero_();
    }
  }
}

}  // namespace fastddp
