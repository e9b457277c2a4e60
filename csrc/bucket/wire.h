// The memory that travels, and who refers to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "bucket/layout.h"
#include "bucket/wire_memory.h"

namespace fastddp {

// Note [Lent wires]
// A wire in which no gradients live is needed only during a window. With `lazy_bucket_allocation` such a wire is made when a
// window needs it, and goes back to the allocator when the window has ended; on the CPU, when its bucket is finished. So does
// every wire of sharded gradients: the rank's run is copied out first. The forward and the optimizer can use the memory. The
// caller's stream has waited for all that used the wire (note [Kept until the join], device/streams.h). So the memory can be
// given out again on that stream at once, however far the device lags behind.
// A captured graph is replayed on the memory that it was captured with. So an exchange keeps its wires once one of its windows
// has been captured.

// One-dimensional, padded with zeros, made when a window first needs it. It can tell its own references to its memory from
// others: note [Aliases of a wire].
class Wire {
 public:
  bool exists() const { return tensor_.defined(); }
  const at::Tensor& tensor() const { return tensor_; }
  // The member's gradient in the wire, with the parameter's strides if these are dense.
  const at::Tensor& view(size_t member) const { return views_[member]; }
  bool has(const at::Tensor& gradient) const { return exists() && gradient.defined() && gradient.is_alias_of(tensor_); }

  // Whether gradients may live here: the wire travels and has their dtype.
  bool is_home() const { return is_home_; }
  void set_home(bool is_home) { is_home_ = is_home; }
  // Where the wire's memory comes from; null: the allocator.
  void comes_from(WireMemory memory) { memory_ = std::move(memory); }

  void make(const Layout& layout) {
    const auto wire = memory_ ? memory_(layout.wire_length(), layout.wire_options()) : layout.empty_wire();
    layout.zero_gaps(wire);
    set(layout, wire);
  }
  // Makes a wire from the allocator. The one before is left to whoever holds it.
  void make_another(const Layout& layout) {
    const auto wire = layout.empty_wire();  // note [Memory of wires]
    layout.zero_gaps(wire);
    set(layout, wire);
  }
  // Takes `wire`, in which gaps are zero: a part of another wire, which knows who holds it.
  void become(const Layout& layout, const at::Tensor& wire) {
    set(layout, wire);
    is_part_ = true;
  }
  // Gives its memory back; gradients that live there keep it.
  void drop() {
    tensor_.reset();
    views_.clear();
    aliases_.clear();
    is_part_ = false;
  }
  // The same, and no wire will be made for gradients to live in: something else travels, or nothing. (Inline, for codecs in
  // other libraries.)
  void disable() {
    drop();
    memory_ = nullptr;
    is_home_ = false;
  }

  // Note [Aliases of a wire]
  // Parts of the wire travel as tensors of their own, and process groups may hold them for longer than we do. The wire remembers
  // each of them weakly, so that those that are still alive do not pass for gradients that somebody keeps. A tensor of other
  // memory is not remembered.
  void lend(const at::Tensor& alias);
  // Whether its memory has references beyond its own and `known` others.
  bool is_held_beside(size_t known) const;

 private:
  void set(const Layout& layout, const at::Tensor& wire);

  at::Tensor tensor_;
  std::vector<at::Tensor> views_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> aliases_;
  WireMemory memory_;
  bool is_home_ = true;
  bool is_part_ = false;
};

}  // namespace fastddp
