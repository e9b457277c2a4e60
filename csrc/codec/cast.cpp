#include "bucket/own_shard.h"
#include "codec/codec.h"

namespace fastddp {
namespace {

class Cast : public Codec {
 public:
  explicit Cast(std::optional<c10::ScalarType> wire) : wire_(wire) {}

  void prepare(const std::vector<Bucket*>& buckets, const std::vector<int64_t>& units) override {
    for (auto* bucket : buckets) {
      const auto dtype = wire_.value_or(bucket->layout.gradient_dtype());
      bucket->set_wire_format({dtype, aligned(dtype), units.front()});
    }
  }

  void on_gradient(Bucket& bucket, size_t member, double scale) override { bucket.pack_on_arrival(member, scale); }

  void encode(size_t, Bucket& bucket, double scale) override { bucket.pack(scale); }

  void decode(Bucket& bucket) override { bucket.unpack(bucket.wire.tensor()); }

  void decode_shard(Bucket& bucket, const at::Tensor& wire) override { bucket.shard->take(bucket, wire); }

  void fill_void(size_t, const Bucket& bucket, const at::Tensor& place, double value) const override {
    bucket.layout.fill(place, value);
  }

 private:
  const std::optional<c10::ScalarType> wire_;
};

}  // namespace

std::unique_ptr<Codec> make_cast(std::optional<c10::ScalarType> wire) {
  return std::make_unique<Cast>(wire);
}

}  // namespace fastddp
