#include <utility>

#include "bucket/own_shard.h"
#include "codec/codec.h"

namespace fastddp {
namespace {

// Sends what another codec sends, and decodes this rank's run alone: note [Sharded gradients], bucket/own_shard.h.
class ShardCodec : public Codec {
 public:
  ShardCodec(std::shared_ptr<Codec> whole, std::shared_ptr<Sharding> sharding)
      : whole_(std::move(whole)), sharding_(std::move(sharding)) {}

  bool fits(const std::vector<Bucket>& buckets) const override { return sharding_->fit(buckets); }

  void prepare(const std::vector<Bucket*>& buckets, const std::vector<int64_t>& units) override {
    whole_->prepare(buckets, units);
  }

  std::optional<Format> format(size_t leg, const Bucket& bucket) const override { return whole_->format(leg, bucket); }

  void place(size_t leg, const Bucket& bucket, const at::Tensor& wire, const at::Tensor& sum) override {
    whole_->place(leg, bucket, wire, sum);
  }

  void displace(const Bucket& bucket) override { whole_->displace(bucket); }

  bool keeps_what_it_sent() const override { return whole_->keeps_what_it_sent(); }

  Adder* adder(size_t leg) override { return whole_->adder(leg); }

  void on_gradient(Bucket& bucket, size_t member, double scale) override { whole_->on_gradient(bucket, member, scale); }

  void encode(size_t leg, Bucket& bucket, double scale) override { whole_->encode(leg, bucket, scale); }

  bool is_sharded() const override { return true; }

  void note_came(size_t, Bucket&, const at::Tensor& wire) override { came_ = wire; }

  void decode(Bucket& bucket) override {
    whole_->decode_shard(bucket, std::exchange(came_, {}));
    bucket.shard->finish(bucket);
  }

  void discard(Bucket& bucket, size_t member) override { whole_->discard(bucket, member); }

  void fill_void(size_t leg, const Bucket& bucket, const at::Tensor& place, double value) const override {
    whole_->fill_void(leg, bucket, place, value);
  }

  void recover(Bucket& bucket) override { whole_->recover(bucket); }

  void keep() override { whole_->keep(); }

  void undo(const at::Tensor& only_if) override { whole_->undo(only_if); }

 private:
  const std::shared_ptr<Codec> whole_;
  const std::shared_ptr<Sharding> sharding_;
  at::Tensor came_;  // the wire of the bucket that is decoded next
};

}  // namespace

std::unique_ptr<Codec> make_shard_codec(std::shared_ptr<Codec> whole, std::shared_ptr<Sharding> sharding) {
  return std::make_unique<ShardCodec>(std::move(whole), std::move(sharding));
}

}  // namespace fastddp
