// What travels in place of gradients.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bucket/bucket.h"
#include "codec/adder.h"
#include "codec/block8_kernels.h"
#include "codec/low_rank_kernels.h"

namespace fastddp {

// Gradients become a wire (encode), and the wire, once it is added up over ranks, becomes gradients (decode). Knows nothing of
// ranks, collectives or the divisor: what gradients are multiplied by is told.
//
// What a bucket has to say may take several *legs*: encode(0) makes what travels first, encode(1) what follows from what the
// ranks then have, and so on; decode() reads what the last one has brought. For each bucket they are called once a window in
// this order: encode(0) on the stream of the last gradient, all others with a side stream current that has waited for the
// collectives. No call takes the GIL.
class Codec {
 public:
  virtual ~Codec() = default;

  // The buckets of a new plan, or of the plan that the codec before had, between two windows: in the plan's order, all of
  // them or those that other codecs have left (Bucket::count is the number of all). Says what their wires have to be, a
  // multiple of `unit` elements.
  virtual void prepare(const std::vector<Bucket*>& buckets, int64_t unit) = 0;

  virtual size_t legs() const { return 1; }

  // What a leg of a bucket needs to travel. None: the bucket's own wire, where gradients may live, travels.
  struct Format {
    c10::ScalarType dtype;
    int64_t elements;
  };
  virtual std::optional<Format> format(size_t leg, const Bucket& bucket) const { return std::nullopt; }
  // Where that is from now on, zeros at first: before a window's first call about the bucket, or one about a later leg. `sum`: where
  // what the ranks make of it will be, which is `wire` itself unless the codec keeps what it has sent. Holds until the next
  // place() of this leg, displace() or prepare().
  virtual void place(size_t leg, const Bucket& bucket, const at::Tensor& wire, const at::Tensor& sum) {}
  // A window has ended, and all wires of the bucket are given back: lets go of them. A place() follows before the next use.
  virtual void displace(const Bucket& bucket) {}
  virtual bool keeps_what_it_sent() const { return false; }

  // Of what it sends, where these are no numbers of the wire's dtype; here for as long as the codec.
  virtual Adder* adder() { return nullptr; }

  // A gradient of `bucket` is final; encode(0) follows when all are.
  virtual void on_gradient(Bucket& bucket, size_t member, double scale) = 0;

  // What is added up over ranks are gradients times `scale`.
  virtual void encode(size_t leg, Bucket& bucket, double scale) = 0;

  // Writes the gradients.
  virtual void decode(Bucket& bucket) = 0;

  // What `Bucket::measured` is, after decode().
  virtual const std::vector<at::Tensor>& measure(Bucket& bucket) { return bucket.measure(); }

  // Nobody used the parameter: what this window has made of the placeholder will be dropped.
  virtual void discard(Bucket& bucket, size_t member) {}

  // Of a window that failed; note [A window that fails], exchange.h.

  // What `place`, as long as the leg's wire, sends instead: `value` in place of gradients where no state of others depends on
  // it.
  virtual void fill_void(size_t leg, const Bucket& bucket, const at::Tensor& place, double value) const = 0;
  // In place of decode(): what the ranks have agreed on is there.
  virtual void recover(Bucket& bucket) {}

  // Note [What is remembered for good]
  // A codec remembers what a step has left out, so that the next one makes up for it. Where no optimizer steps with the
  // gradients (a window that failed, a step that is skipped) nothing was left out of anything. So a codec keeps what it
  // remembered when the step began, and undo() brings it back, bit for bit. It is kept when it is first changed, not before.

  // A step begins: from here on.
  virtual void keep() {}
  // Nothing is in flight; gradients may have been changed since the window began, or be gone. `only_if`: one element on the
  // device, 0 leaves everything as it is; undefined: always.
  virtual void undo(const at::Tensor& only_if) {}
};

// Gradients as they are, in `wire`; none: in their own dtype.
std::unique_ptr<Codec> make_cast(std::optional<c10::ScalarType> wire);

struct LowRankOptions {
  bool error_feedback;
  bool warm_start;
  bool batched;  // a bucket is one square matrix
  double epsilon;
  uint64_t seed;
  uint64_t first_window;                // what is random depends on the window's number
  std::optional<c10::ScalarType> wire;  // none: the gradients' dtype
};

// Owned by the caller and changed in place; the same Q on all ranks.
struct LowRankMemory {
  struct Matrix {
    at::Tensor error;  // [rows, columns], the gradients' dtype; undefined without error feedback, unless batched
    at::Tensor q;      // [rank, columns], fp32 or fp64, orthonormal rows; undefined: not compressed
  };
  std::vector<Matrix> of_parameters;  // by parameter; empty if batched
  std::vector<Matrix> of_buckets;     // if batched: squares
};

struct Block8Options {
  Block8 format;
  std::optional<uint64_t>
      seed;               // none: rounded to nearest; else stochastically, by what seed, window, rank and bucket make
  uint64_t first_window;  // what is random depends on the window's number
  uint64_t rank;
};

// What rounding has left out of each parameter's gradients, in units of their average. Owned by the caller, who may change values
// in place; the codec makes the tensors, anew for each plan, and takes over what there is.
struct Block8Errors {
  std::vector<at::Tensor>
      of_parameters;  // fp32, [elements] in the order of the parameter's memory; undefined: none so far
  // Of those that were changed since the step began: what they were then, and maybe more elements. The codec's alone.
  std::vector<at::Tensor> kept;
};

// Numbers of 8 bits, with a scale for each block of them. `errors` null: what rounding loses is lost.
std::unique_ptr<Codec> make_block8(Block8Options options, std::shared_ptr<Block8Errors> errors);

// PowerSGD (Vogels et al., 2019): a gradient M travels as two thin factors, P = M Q and Q = M^T P.
std::unique_ptr<Codec> make_low_rank(LowRankOptions options, LowRankMemory memory);

}  // namespace fastddp
