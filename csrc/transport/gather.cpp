#include "transport/gather.h"

#include <utility>

namespace fastddp {

Gather::Gather(Lanes lanes, c10::Device device, Cut cut, size_t buckets, std::shared_ptr<Interruption> interruption,
               size_t model)
    : lanes_(std::move(lanes)),
      device_(device),
      cut_(std::move(cut)),
      owners_(make_owners(lanes_, device, /*own_sums=*/false)),
      interruption_(std::move(interruption)) {
  for (size_t bucket = 0; bucket < buckets; ++bucket) pieces_.emplace_back(tag_of(/*is_gathered=*/true, model, bucket), bucket);
}

void Gather::start(size_t bucket, const at::Tensor& memory) {
  auto& piece = pieces_[bucket];
  TORCH_CHECK(!is_on_its_way(bucket), "fastddp: the parameters of bucket ", bucket, " are on their way already");
  piece.wire = memory;
  piece.shards = cut_(memory, bucket);
  const WithoutPythonObjects without;
  owners_->start_spread(0, lanes_.of(bucket, 0), piece, piece.shards);
}

void Gather::wait(size_t bucket) {
  auto& piece = pieces_[bucket];
  const Interruption::Scope interruptible(*interruption_, device_);
  const auto memory = std::exchange(piece.wire, {});  // also if a wait raises
  wait_for(std::exchange(piece.works, {}));
  // Orders no gradients.
  wait_for(std::exchange(piece.acks, {}));
  piece.shards.clear();
}

}  // namespace fastddp
