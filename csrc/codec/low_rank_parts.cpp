#include "codec/low_rank_parts.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "codec/kept.h"

namespace fastddp {
namespace {

int64_t elements_of(const at::Tensor& tensor) {
  return tensor.numel() * (tensor.is_complex() ? 2 : 1);
}

c10::ScalarType computed_in(const Bucket& bucket) {
  return bucket.layout.gradient_dtype() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

LowRankParts::LowRankParts(const Bucket& bucket, const LowRankOptions& options, const LowRankMemory& memory)
    : in_message(options.wire.value_or(bucket.layout.gradient_dtype()) == computed_in(bucket)),
      is_batched(options.batched),
      low_rank(make_low_rank_kernels(bucket.device())),
      p_kernels(in_message ? nullptr : make_kernels(bucket.device())),
      q_kernels(make_kernels(bucket.device())) {
  if (is_batched) {
    for (size_t member = 0; member < bucket.size(); ++member) compressed.push_back(member);
    const auto& square = memory.of_buckets.at(bucket.index());
    add(square, square.q.size(1), bucket.index(), options);
    result = at::empty({square.error.numel()}, square.error.options());
    matrices.back().gradient = result.view_as(square.error);
  }
  for (size_t member = 0; member < bucket.size() && !is_batched; ++member) {
    const auto parameter = bucket.layout.parameter(member);
    const auto& like = bucket.layout[member].like;
    const auto& matrix = memory.of_parameters.at(parameter);
    if (matrix.q.defined()) {
      compressed.push_back(member);
      add(matrix, like.numel() / matrix.q.size(1), parameter, options);
    } else {
      rest.push_back(member);
      rest_elements += elements_of(like);
    }
  }
  elements[0] += rest_elements;
}

void LowRankParts::add(const LowRankMemory::Matrix& memory, int64_t rows, uint64_t number, const LowRankOptions& options) {
  const auto& [error, q] = memory;
  const auto p = in_message ? at::Tensor() : at::empty({rows, q.size(0)}, q.options());
  matrices.push_back({{}, error, p, q, error});
  before_step_.push_back({options.error_feedback ? at::empty_like(error) : at::Tensor(), at::empty_like(q)});
  numbers.push_back(number);
  rows_.push_back(rows);
  elements[0] += rows * q.size(0);
  elements[1] += q.numel();
}

void LowRankParts::place_first(const Bucket& bucket, const at::Tensor& wire) {
  int64_t offset = 0;
  p_slots.clear();
  rest_views.clear();
  for (size_t i = 0; i < matrices.size(); ++i) {
    auto& matrix = matrices[i];
    const auto rank = matrix.q.size(0);
    const auto place = wire.narrow(0, offset, rows_[i] * rank).view({rows_[i], rank});
    if (in_message) {
      matrix.p = place;
    } else {
      p_slots.push_back({matrix.p, place});
    }
    offset += place.numel();
  }
  rest_wire = wire.narrow(0, offset, wire.numel() - offset);
  for (const auto member : rest) {
    rest_views.push_back(view_of(wire, bucket.layout[member].like, offset));
    offset += elements_of(bucket.layout[member].like);
  }
}

void LowRankParts::place_q(const at::Tensor& wire) {
  int64_t offset = 0;
  q_slots.clear();
  for (const auto& matrix : matrices) {
    q_slots.push_back({matrix.q, wire.narrow(0, offset, matrix.q.numel()).view_as(matrix.q)});
    offset += matrix.q.numel();
  }
}

void LowRankParts::leave_wires() {
  rest_wire.reset();
  rest_views.clear();
  p_slots.clear();
  q_slots.clear();
  if (!in_message) return;
  for (auto& matrix : matrices) matrix.p.reset();
}

std::vector<at::Tensor> LowRankParts::used_by_the_side_stream() const {
  std::vector<at::Tensor> tensors{result};
  for (const auto& matrix : matrices) tensors.insert(tensors.end(), {matrix.p, matrix.q, matrix.memory});
  for (const auto& kept : before_step_) tensors.insert(tensors.end(), {kept.error, kept.q, kept.error_before});
  return tensors;
}

// ---------------------------------------------------------------------- note [What is remembered for good], codec.h

void LowRankParts::keep_q(const std::vector<size_t>& which) {
  std::vector<at::Tensor> kept, now;
  for (const auto i : which) {
    if (std::exchange(before_step_[i].has_q, true)) continue;
    kept.push_back(before_step_[i].q);
    now.push_back(matrices[i].q);
  }
  if (!kept.empty()) at::_foreach_copy_(kept, now);
}

void LowRankParts::keep_errors(const Bucket& bucket, const std::vector<size_t>& which) {
  keep_q(which);
  is_captured_ = is_captured_ || is_capturing(bucket.device());
  const auto may_be_dropped = [&](size_t member) { return bucket.window[member].may_be_dropped; };
  std::vector<at::Tensor> kept, now;
  for (const auto i : which) {
    auto& matrix = matrices[i];
    auto& own = before_step_[i];
    matrix.before = matrix.memory;
    if (!own.error.defined()) continue;
    if (std::exchange(own.has_error, true)) {
      const bool is_needed = is_batched ? std::ranges::any_of(compressed, may_be_dropped) : may_be_dropped(compressed[i]);
      own.error_before = is_needed ? matrix.memory.clone() : at::Tensor();
      continue;
    }
    own.error_before = own.error;
    if (!is_captured_ && change_places(matrix.memory, own.error)) {
      matrix.before = own.error;
    } else {
      kept.push_back(own.error);
      now.push_back(matrix.memory);
    }
  }
  if (!kept.empty()) at::_foreach_copy_(kept, now);
}

void LowRankParts::undo(const at::Tensor& only_if) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto& matrix = matrices[i];
    // Of a window that failed.
    if (matrix.gradient.defined()) keep_for_current_stream(matrix.gradient);
    const auto& [error, q, has_error, has_q, error_before] = before_step_[i];
    if (has_q) bring_back(matrix.q, q, only_if);
    if (has_error) undo_errors(matrix.memory, error, only_if, is_captured_);
  }
  if (!only_if.defined()) step_begins();
  let_gradients_go();
}

void LowRankParts::discard(const Bucket& bucket, size_t member) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto& before = before_step_[i].error_before;
    if (!before.defined() || (!is_batched && compressed[i] != member)) continue;
    const auto own = [&](const at::Tensor& square) {
      return is_batched ? bucket.layout.view(square.view(-1), member) : square;
    };
    own(matrices[i].memory).copy_(own(before));
  }
}

}  // namespace fastddp
