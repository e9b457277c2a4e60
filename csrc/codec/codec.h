// A codec turns gradients into a wire, and the wire back into gradients.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "block8/kernels.h"
#include "bucket/bucket.h"
#include "bucket/sharding.h"
#include "codec/adder.h"
#include "low_rank/kernels.h"

namespace fastddp {

// encode() turns gradients into a wire. The ranks add up their wires. decode() turns the sum into gradients. A codec knows
// nothing of ranks, collectives or the divisor: its caller gives it the scale of the gradients.
//
// A bucket may travel in several *legs*. encode(0) makes the first leg, encode(1) makes the second one from the sum of the
// first, and so on. decode() reads the sum of the last leg. Each window calls them once for each bucket, in this order:
// encode(0) on the stream of the last gradient, the others on a side stream that has waited for the collectives. No call takes
// the GIL.
class Codec {
 public:
  virtual ~Codec() = default;

  // Whether it was made for such buckets. If not, another codec will be.
  virtual bool fits(const std::vector<Bucket>& buckets) const { return true; }
  // Sets the wire format of each bucket. Called between two windows, with a new plan or a new codec. `buckets` are in the plan's
  // order. `units`: by leg, wires are a multiple of so many elements.
  virtual void prepare(const std::vector<Bucket*>& buckets, const std::vector<int64_t>& units) = 0;

  virtual size_t legs() const { return 1; }

  // The wire that a leg of a bucket needs. None: a bucket's own wire travels, in which gradients may live.
  struct Format {
    c10::ScalarType dtype;
    int64_t elements;
  };
  virtual std::optional<Format> format(size_t leg, const Bucket& bucket) const { return std::nullopt; }
  // Gives the codec the leg's `wire`, which is zero at first, before the first call of a window that needs it. `sum`: where
  // the sum over ranks will be. It is `wire` itself, unless the codec keeps what it sent. Both hold until the next place() of
  // this leg, displace() or prepare().
  virtual void place(size_t leg, const Bucket& bucket, const at::Tensor& wire, const at::Tensor& sum) {}
  // Drops the bucket's wires, because a window has ended and gives them back. A place() follows before the next use.
  virtual void displace(const Bucket& bucket) {}
  virtual bool keeps_what_it_sent() const { return false; }

  // Of a leg without a format: the bucket whose wire travels, and the wire. It exists when the leg has been encoded.
  virtual Bucket& carrier(size_t leg, Bucket& bucket) const { return bucket; }
  virtual at::Tensor wire(size_t leg, Bucket& bucket) const { return carrier(leg, bucket).wire.tensor(); }
  // Such a leg's sum is in `wire`, which may be another one than was encoded (note [A window that fails], exchange.h).
  virtual void note_came(size_t leg, Bucket& bucket, const at::Tensor& wire) {}

  // Adds up wires that are not numbers of their dtype; null: they are. Lives as long as the codec.
  virtual Adder* adder(size_t leg) { return nullptr; }

  // A gradient of `bucket` is final; encode(0) follows when all are.
  virtual void on_gradient(Bucket& bucket, size_t member, double scale) = 0;

  // The ranks will add up the gradients times `scale`.
  virtual void encode(size_t leg, Bucket& bucket, double scale) = 0;

  // Writes the gradients.
  virtual void decode(Bucket& bucket) = 0;

  // Whether decode() writes only this rank's part of the averages. Then it is called in a window of other ranks too, because this
  // rank has to step with that part.
  virtual bool is_sharded() const { return false; }
  // In place of decode() where gradients are sharded: writes those of `bucket.shard` from this rank's run of the sum. `wire`: what
  // travelled, of a leg without a format.
  virtual void decode_shard(Bucket& bucket, const at::Tensor& wire) {
    TORCH_CHECK(false, "fastddp: this codec needs whole gradients");
  }

  // Returns `BucketWindow::measured`, after decode().
  virtual const std::vector<at::Tensor>& measure(Bucket& bucket) { return bucket.measure(); }

  // No rank used the parameter, so this window's result for its placeholder will be dropped.
  virtual void discard(Bucket& bucket, size_t member) {}

  // Whether legs after the first one carry other ranks' gradients, so that other ranks need them from a rank without inputs too.
  virtual bool relays() const { return false; }

  // For a window that failed: note [A window that fails], exchange.h.

  // Fills `place`, which travels instead of the leg's wire and is as long. Gradients become `value`, except where the state of
  // other ranks would depend on it.
  virtual void fill_void(size_t leg, const Bucket& bucket, const at::Tensor& place, double value) const = 0;
  // Called in place of decode(), when the ranks' sum has come.
  virtual void recover(Bucket& bucket) {}

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

// For two levels; node_codec.cpp. `outer` encodes what goes between nodes. `remembers`: it depends on earlier windows. `spreads`:
// the ranks of a node get each other's results; false: gradients are sharded.
std::unique_ptr<Codec> make_node_codec(std::shared_ptr<Codec> outer, std::shared_ptr<Sharding> shards, bool remembers,
                                       bool spreads = true);

// For sharded gradients; shard_codec.cpp. `whole` encodes them.
std::unique_ptr<Codec> make_shard_codec(std::shared_ptr<Codec> whole, std::shared_ptr<Sharding> sharding);

// Sends gradients as they are, in dtype `wire`; none: in their own dtype.
std::unique_ptr<Codec> make_cast(std::optional<c10::ScalarType> wire);

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
  std::vector<at::Tensor> kept;
};

// Sends numbers of 8 bits, with a scale for each block of them. `errors` null: rounding errors are lost.
std::unique_ptr<Codec> make_block8(Block8Options options, std::shared_ptr<Block8Errors> errors);

// PowerSGD (Vogels et al., 2019): a gradient M travels as two thin factors, P = M Q and Q = M^T P.
std::unique_ptr<Codec> make_low_rank(LowRankOptions options, LowRankMemory memory);

}  // namespace fastddp
