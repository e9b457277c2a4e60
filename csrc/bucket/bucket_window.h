// The state of a bucket's gradients in one window.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "device/streams.h"

namespace fastddp {

// Note [Placeholders]
// A parameter that this rank does not use travels too, because another rank may use it. What is sent is what
// `parameter.grad` holds, or zeros. Only the end of the window tells whether any rank used the parameter. Until then an
// unexpected gradient may come, and if no rank used it, `parameter.grad` must stay as it is. So pack reads a placeholder, and
// the exchange writes it. At the end it replaces the gradient, or is dropped.
struct Placeholder {
  at::Tensor gradient;     // what travels; undefined: zeros, and nothing has come back yet
  at::Tensor before;       // what the gradient was; undefined: there was none
  at::Tensor unexpected;   // gradients that came for the parameter nevertheless
  bool was_empty = false;  // there was no gradient when the placeholder began
  bool is_over = false;    // the placeholder is resolved; its memory stays until the next window, when it has been read
};

struct MemberState {
  bool final = false;           // the gradient no longer changes before it is packed
  bool exclusive = false;       // nobody but the parameter refers to the gradient
  bool packed = false;          // the gradient is in what travels
  bool in_wire = false;         // the gradient's memory is the wire's: there is nothing to unpack
  bool measured = false;        // `Bucket::local_sums` has measured the gradient
  bool may_be_dropped = false;  // what travels is dropped if no rank has used the parameter
  std::optional<Placeholder> placeholder = {};

  bool has_placeholder() const { return placeholder && !placeholder->is_over; }
};

// What writers of averages have seen of them: partial sums of squares and counts of what is not finite, each [..., 2]; and tensors of
// averages that nobody has read yet.
struct Seen {
  std::vector<at::Tensor> measured, unread;
};

class BucketWindow {
 public:
  explicit BucketWindow(size_t members) : members_(members) {}

  MemberState& operator[](size_t member) { return members_[member]; }
  const MemberState& operator[](size_t member) const { return members_[member]; }

  // Begins a window.
  void reset() {
    members_.assign(members_.size(), {});
    packs = measurings = beside = 0;
    is_settled = rewritten = false;
    seen = {};
    producers.clear();
    kept.let_go();
  }

  // Averaged gradients are no longer what was seen.
  void note_rewritten() {
    rewritten = true;
    seen = {};
  }

  bool none_is_packed() const { return std::ranges::none_of(members_, &MemberState::packed); }

  size_t packs = 0;            // calls of pack kernels so far
  size_t measurings = 0;       // calls of kernels that measure gradients so far
  size_t beside = 0;           // bytes of final gradients that are not packed and not in the wire
  bool left_in_place = false;  // gradients stay as autograd made them until backward has ended: reduction.h
  bool is_settled = false;     // settle() may have moved gradients into the wire
  bool rewritten = false;      // gradients are no longer what was in the wire
  Seen seen;                   // empty: nothing has been seen
  Producers producers;         // the streams on which gradients came
  KeptUntilJoin kept;          // gradients that the side stream uses

 private:
  std::vector<MemberState> members_;
};

}  // namespace fastddp
