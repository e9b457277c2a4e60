// The memory that travels, and who has a hand on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "bucket/layout.h"
#include "bucket/wire_memory.h"

namespace fastddp {

// Note [Lent wires]
// A wire in which no gradients live is of use during a window only. With `lends_wires` (lazy_bucket_allocation) such wires are
// made when a window needs them, and given back to the allocator when it has ended, which has their memory for the forward and
// the optimizer. The caller's stream has waited for all that used them (note [Kept until the join], device/streams.h), so it can
// be given out again on that stream at once, however far the device lags behind.
// A captured graph is replayed on the memory that it was captured with. So an exchange of which a window was captured keeps its
// wires from then on.

// One-dimensional, padded with zeros; made when a window first needs it. Knows how many references to its memory are its own:
// what it hands out it remembers.
class Wire {
 public:
  bool exists() const { return tensor_.defined(); }
  const at::Tensor& tensor() const { return tensor_; }
  // The member's gradient in it, with the parameter's strides if these are dense.
  const at::Tensor& view(size_t member) const { return views_[member]; }
  bool has(const at::Tensor& gradient) const { return exists() && gradient.defined() && gradient.is_alias_of(tensor_); }

  // Gradients may live here: it travels, and has their dtype.
  bool is_home() const { return is_home_; }
  void set_home(bool is_home) { is_home_ = is_home; }
  // Where its memory comes from; null: the allocator.
  void comes_from(WireMemory memory) { memory_ = std::move(memory); }

  void make(const Layout& layout);
  // From the allocator, in place of one that is left to whoever holds it.
  void make_another(const Layout& layout);
  // Is this memory, in which gaps are zero: a part of another wire, which knows who holds it.
  void become(const Layout& layout, const at::Tensor& wire);
  // Gives its memory back; gradients that live there keep it.
  void drop();
  // The same, and none will be made for gradients to live in: something else travels, or nothing.
  void do_without();

  // Its parts as `cut` makes them, the same tensors until it is another wire or takes them back. A process group may hold
  // what it has sent for a while, and what it holds then is nothing new.
  const std::vector<at::Tensor>& parts(const std::function<std::vector<at::Tensor>(const at::Tensor&)>& cut);
  // Remembers other tensors of its memory, unless there are some already.
  void hand_out(const std::vector<at::Tensor>& aliases);
  void take_back() { aliases_.clear(); }
  const std::vector<at::Tensor>& aliases() const { return aliases_; }

  // References to its memory beyond its own and `known` ones.
  bool is_held_beside(size_t known) const;

 private:
  void set(const Layout& layout, const at::Tensor& wire);

  at::Tensor tensor_;
  std::vector<at::Tensor> views_;
  std::vector<at::Tensor> aliases_;
  WireMemory memory_;
  bool is_home_ = true;
  bool is_part_ = false;
};

}  // namespace fastddp
