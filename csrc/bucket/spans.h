// Spans: parts of gradients, and where each of them is in a wire. A bucket, a node's run of it and a rank's shard are all of this
// kind.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "pack/local_sums.h"

namespace fastddp {

inline int64_t rounded_up(int64_t number, int64_t unit) {
  return (number + unit - 1) / unit * unit;
}

// Where members begin, and how long a wire is: multiples of so many numbers, beside what a codec asks for.
struct Grid {
  int64_t member = 1;
  int64_t wire = 1;
  bool operator==(const Grid&) const = default;
};

// Elements [begin, end) of a parameter, in the order of its memory.
struct Span {
  size_t number;     // in its list
  size_t parameter;  // its number in the reducer
  int64_t begin;
  int64_t end;
  int64_t offset;               // where it begins in the wire, in numbers: a complex element is two
  at::Tensor like;              // has the shape, strides and device of its gradient; it may have no memory
  bool packs = false;           // encode() adds what it reads of it to Spans::sums, as pack does
  at::Tensor gradient = {};     // this window's; undefined: zeros travel
  bool may_be_dropped = false;  // what travels is dropped if no rank has used the parameter

  int64_t length() const { return like.numel() * (like.is_complex() ? 2 : 1); }
};

// The numbers of some spans.
using Numbers = std::span<const size_t>;

struct Spans {
  size_t bucket;          // the number of the bucket that they are of
  c10::ScalarType dtype;  // of gradients, real
  c10::Device device;
  Grid grid = {};
  std::vector<Span> all = {};
  int64_t numbers = 0;      // of the wire, with gaps and padding
  bool needs_wire = false;  // they cannot travel where they are
  // This window's.
  LocalSums* sums = nullptr;  // wants what encode() sees of this rank's gradients; null: nobody does
  size_t call = 0;            // how many times they have been encoded

  // Once a plan, by whoever writes their wire: spans begin at multiples of `apart` numbers. The wire has `tail` more numbers, and is a
  // multiple of `unit`.
  void place(int64_t apart, int64_t unit, int64_t tail = 0) {
    const auto step = std::lcm(apart, grid.member), whole = std::lcm(unit, grid.wire);
    int64_t next = 0, end = 0;
    for (auto& span : all) {
      span.offset = next;
      end = next + span.length();
      next = rounded_up(end, step);
    }
    numbers = rounded_up(end + tail, whole);
  }
};

}  // namespace fastddp
