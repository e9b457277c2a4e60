// A codec turns spans of gradients into a wire, and the wire back into gradients.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "block8/kernels.h"
#include "bucket/bucket_window.h"
#include "bucket/spans.h"
#include "bucket/wire.h"
#include "codec/adder.h"
#include "low_rank/kernels.h"

namespace fastddp {

// What a bucket's spans need to travel once. Decided once a plan.
struct Leg {
  c10::ScalarType dtype;
  int64_t elements;
  bool keeps_sent = false;  // the ranks' sum goes to memory beside the wire
  bool is_whole = false;    // encode() takes all spans at once
  int64_t adds_unit = 0;    // ranks add it up by Codec::add(), in parts of multiples of so many elements; 0: it is numbers
};

using Wires = std::span<Wire>;  // of a bucket, by leg

// encode() turns gradients into a wire, decode() turns the ranks' sum of it into gradients. A codec knows nothing of ranks,
// collectives or the divisor: its caller gives it the scale of the gradients. It keeps what it remembers, and no wire: what it
// cuts out of one is in Wire::parts.
//
// A bucket may travel in several *legs*. encode(0) makes the first leg's wire, encode(1) makes the second one's from the sum of the
// first, and so on. decode() reads the sum of the last leg. Each window calls them once for each bucket, in this order: encode(0)
// on the stream of the last gradient, the others on a side stream that has waited for the collectives. encode(0) may be called more
// than once, for some spans each time. No call takes the GIL.
class Codec : public Adder {
 public:
  explicit Codec(bool remembers = true) : remembers(remembers) {}

  // Whether a window depends on earlier ones: then NaN would stay, and what is encoded has to be averages, not sums.
  const bool remembers;

  // Called between two windows, with all spans of a new plan, in its order. Places them, and returns what each bucket needs, by leg.
  // No legs: the gradients' own memory would travel as it is. Wires will be multiples of `owners` times Leg::adds_unit, or of
  // `owners` elements.
  virtual std::vector<std::vector<Leg>> plan(std::vector<Spans>& buckets, int64_t owners) = 0;

  // Writes a leg's wire, which is zero when it is new: `which` of the spans, times `scale`. All, unless the leg is the first one.
  virtual void encode(size_t leg, const Spans& spans, Numbers which, Wires wires, double scale) = 0;

  // Writes the gradients: of the spans that plan() was given, or of others of the same bucket in their places, which are parts
  // of them (`are_parts`). A span without a gradient gets none.
  virtual Seen decode(const Spans& spans, Wires wires, bool are_parts) = 0;

  // No rank used these spans' parameters, so this window's results for them will be dropped.
  virtual void discard(const Spans& spans, Numbers which) {}

  // For a window that failed: note [A window that fails], trip/driver.h.

  // Fills `place`, which travels instead of the leg's wire and is as long. Gradients become `value`, except where the state of
  // other ranks would depend on it.
  virtual void fill_void(size_t leg, size_t bucket, const at::Tensor& place, double value) const = 0;
  // Called in place of decode(), when the ranks' sum has come.
  virtual void recover(size_t bucket, Wires wires) {}

  // Note [What is remembered for good]
  // A codec remembers what a step left out, so that the next step makes up for it. If no optimizer steps with the gradients (the
  // window failed, or the step is skipped), nothing was left out. So a codec keeps what it remembered when the step began, from
  // when it first changes its memory, and undo() restores it bit for bit.

  // A step begins here.
  virtual void keep() {}
  // Called when nothing is in flight. Gradients may have changed since the window began, or be gone. `only_if`: one element on
  // the device, 0 means do nothing; undefined: always undo.
  virtual void undo(const at::Tensor& only_if) {}
};

// Sends gradients as they are, in dtype `wire`; none: in their own dtype.
std::shared_ptr<Codec> make_cast(std::optional<c10::ScalarType> wire);

struct LowRankOptions {
  bool error_feedback;
  bool warm_start;
  bool batched;  // a bucket is one square matrix
  double epsilon;
  uint64_t seed;
  uint64_t first_window;                // random numbers depend on the window's number
  std::optional<c10::ScalarType> wire;  // none: the gradients' dtype
};

// Owned by the caller, changed in place. Q is the same on all ranks.
struct LowRankMemory {
  struct Matrix {
    at::Tensor error;  // [rows, columns], the gradients' dtype; undefined without error feedback, unless batched
    at::Tensor q;      // [rank, columns], fp32 or fp64, orthonormal rows; undefined: the matrix is not compressed
  };
  std::vector<Matrix> of_parameters;  // by parameter; empty if batched
  std::vector<Matrix> of_buckets;     // if batched: squares
};

struct Block8Options {
  Block8 format;
  std::optional<uint64_t> seed;  // none: rounds to nearest; else rounds stochastically, by seed, window, rank and bucket
  uint64_t first_window;         // random numbers depend on the window's number
  uint64_t rank;
};

// The rounding errors of each parameter's gradients, in units of their average. The caller owns them and may change values in
// place. The codec makes new tensors for each plan, and copies the old values into them.
struct Block8Errors {
  // By parameter: fp32, [elements] in the order of the parameter's memory; undefined: no error so far.
  std::vector<at::Tensor> of_parameters;
  // By parameter: the errors when the step began, if they have changed since, maybe with padding. For the codec alone.
  std::unordered_map<size_t, at::Tensor> kept;
};

// Sends numbers of 8 bits, with a scale for each block of them. `errors` null: rounding errors are lost.
std::shared_ptr<Codec> make_block8(Block8Options options, std::shared_ptr<Block8Errors> errors);

// PowerSGD (Vogels et al., 2019): a gradient M travels as two thin factors, P = M Q and Q = M^T P.
std::shared_ptr<Codec> make_low_rank(LowRankOptions options, LowRankMemory memory);

}  // namespace fastddp
