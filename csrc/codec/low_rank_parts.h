// PowerSGD: what is known of one bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <vector>

#include "codec/codec.h"
#include "codec/flat_gradients.h"

namespace fastddp {

// Note [Factors in the message]
// P and Q travel in the wire's dtype. Where that is the dtype in which they are computed, P is computed in the message itself,
// and stays there: ranks add it up in place, and it is used from there until the window ends. Q is computed in the message too,
// and then copied out, because it is also the next window's.
//
// Otherwise both have memory of their own, and are packed and unpacked.

// The matrices and the uncompressed rest of one bucket. All tensors but the gradients stay the same from window to window.
struct LowRankParts {
  LowRankParts(const Bucket& bucket, const LowRankOptions& options, const LowRankMemory& memory);

  // The wires of leg 0 (P, then the rest) and of leg 1 (Q).
  void place_first(const Bucket& bucket, const at::Tensor& wire);
  void place_q(const at::Tensor& wire);
  void leave_wires();

  // The window is about to change Q of the matrices `which`. Copies those that this step has not changed before.
  void keep_q(const std::vector<size_t>& which);
  // The window is about to write all of their memory, too. Afterwards `before` of each has its error: note [Errors change
  // places], kept.h.
  void keep_errors(const Bucket& bucket, const std::vector<size_t>& which);
  void step_begins() {
    for (auto& kept : before_step_) kept.has_error = kept.has_q = false;
  }
  // Undoes what the step has changed; `only_if` as in Codec::undo().
  void undo(const at::Tensor& only_if);
  // The result for `member` will be dropped: its error is what it was before this window.
  void discard(const Bucket& bucket, size_t member);
  void let_gradients_go() {
    flat.let_go();
    if (is_batched) return;
    for (auto& matrix : matrices) matrix.gradient.reset();
  }

  // For project(): the matrices, with Q where it is written to.
  std::vector<LowRankMatrix> projections() const {
    auto all = matrices;
    for (size_t i = 0; i < all.size() && in_message; ++i) all[i].q = q_slots[i].view;
    return all;
  }
  // Tensors that live as long as this object, or as its wires.
  std::vector<at::Tensor> used_by_the_side_stream() const;

  bool in_message = false;  // note [Factors in the message]
  bool is_batched = false;
  std::vector<size_t> compressed;       // members, in the order of `matrices`; batched: all
  std::vector<LowRankMatrix> matrices;  // batched: one
  std::vector<uint64_t> numbers;        // of the matrices: parameters; batched: the bucket
  std::vector<size_t> rest;             // uncompressed members
  int64_t rest_elements = 0;
  std::array<int64_t, 2> elements{};  // of the wire, by leg
  at::Tensor rest_wire;
  std::vector<at::Tensor> rest_views;
  at::Tensor result;                   // batched: the new gradients, flat
  std::vector<Slot> p_slots, q_slots;  // from the factors to their places in the wires; no P where it is in the message
  FlatGradients flat;                  // this window's
  bool rest_is_measured = false;
  std::unique_ptr<LowRankKernels> low_rank;
  std::unique_ptr<Kernels> p_kernels, q_kernels;  // one each, since each remembers one set of addresses

 private:
  // A matrix's error and Q when the step began, once a window has changed them.
  struct Kept {
    at::Tensor error, q;  // error: undefined without error feedback
    bool has_error = false, has_q = false;
    at::Tensor error_before;  // this window, if discard() may need it
  };

  void add(const LowRankMemory::Matrix& memory, int64_t rows, uint64_t number, const LowRankOptions& options);

  std::vector<int64_t> rows_;      // by matrix
  std::vector<Kept> before_step_;  // by matrix
  bool is_captured_ = false;       // a step was captured
};

}  // namespace fastddp
