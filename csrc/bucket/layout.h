// Which gradients travel together, and where each of them is in the wire.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bucket/gradient_memory.h"
#include "bucket/spans.h"

namespace fastddp {

// The parameters of each bucket, in the order of collectives.
using Plan = std::vector<std::vector<size_t>>;

// Note [Aligned members]
// GPU kernels move 16 bytes at once where source and destination begin at multiples of 16 bytes, and single elements elsewhere.
// One bias of 10 elements would put everything after it on the slow path. So in the wires of fastddp's own exchanges each member
// begins at a multiple of 16 bytes. The gaps between members are zero when the wire is made. Pack does not write them, and sums
// of zeros are zero, so whoever reads a whole wire reads gradients and zeros. A hook written for torch's DDP expects one gradient
// right after the other, and so does batched PowerSGD: their wires have no gaps.
inline int64_t aligned(c10::ScalarType dtype) {
  return 16 / static_cast<int64_t>(c10::elementSize(dtype));
}

struct WireFormat {
  c10::ScalarType dtype;  // real: a complex gradient is pairs of numbers
  int64_t apart = 1;      // members begin at multiples of so many numbers
  int64_t unit = 1;       // a wire's length is a multiple of it
  int64_t tail = 0;       // its last elements are for what is no gradient: so many
  bool operator==(const WireFormat&) const = default;
};

// The layout of one bucket. Only the wire's format and the grid may change, between two windows.
class Layout {
 public:
  // Bucket `index` of `count`, in the order of collectives. Its members are `numbers` of these parameters.
  Layout(size_t index, size_t count, const std::vector<size_t>& numbers, const std::vector<at::Tensor>& parameters,
         const std::vector<std::string>& names, GradientForm form);

  size_t index() const { return spans_.bucket; }
  size_t count() const { return count_; }
  const GradientForm& form() const { return form_; }
  size_t size() const { return spans_.all.size(); }
  // Whole gradients: each member is a span.
  const Spans& spans() const { return spans_; }
  const Span& operator[](size_t member) const { return spans_.all[member]; }
  const std::string& name(size_t member) const { return names_[member]; }
  size_t parameter(size_t member) const { return spans_.all[member].parameter; }
  std::vector<size_t> parameters() const { return of_members(&Span::parameter); }

  c10::Device device() const { return spans_.device; }
  // A real dtype, the same for all members.
  c10::ScalarType gradient_dtype() const { return spans_.dtype; }

  // Where each member begins in the wire, and its length there, in numbers.
  std::vector<size_t> offsets() const { return of_members(&Span::offset); }
  std::vector<size_t> lengths() const { return of_members(&Span::length); }
  // The numbers of all gradients, without gaps and padding.
  int64_t numbers() const {
    int64_t numbers = 0;
    for (const auto& member : spans_.all) numbers += member.length();
    return numbers;
  }
  // extent(): the numbers up to the end of the last member. wire_length(): with the padding after it.
  int64_t extent() const { return spans_.all.back().offset + spans_.all.back().length(); }
  int64_t wire_length() const { return spans_.numbers; }

  const WireFormat& format() const { return format_; }
  // Returns whether the format has changed.
  bool set_format(WireFormat format);
  // The same for the grid.
  bool set_grid(Grid grid);

  void zero_gaps(const at::Tensor& wire) const;
  at::Tensor tail(const at::Tensor& wire) const { return wire.narrow(0, wire.numel() - format_.tail, format_.tail); }
  // Writes `value` in place of every gradient, and zeros to the gaps.
  void fill(const at::Tensor& wire, double value) const {
    wire.fill_(value);
    zero_gaps(wire);
  }
  // The member's part of a tensor laid out like the wire.
  at::Tensor view(const at::Tensor& wire, size_t member) const;
  // Fresh memory for a gradient.
  at::Tensor empty_gradient(size_t member) const {
    const auto& like = spans_.all[member].like;
    return fastddp::empty_gradient(like, form_.dtype_of(like));
  }

 private:
  template <typename Number>
  std::vector<size_t> of_members(Number Span::* number) const {
    std::vector<size_t> numbers;
    for (const auto& member : spans_.all) numbers.push_back(static_cast<size_t>(std::invoke(number, member)));
    return numbers;
  }

  size_t count_;
  GradientForm form_;
  std::vector<std::string> names_;
  Spans spans_;
  WireFormat format_;
};

}  // namespace fastddp
