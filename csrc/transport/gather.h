// Gives all ranks what each of them has: the parameters that a sharded optimizer has stepped with.
#pragma once

#include <memory>
#include <vector>

#include "transport/collectives.h"
#include "waits/interruption.h"

namespace fastddp {

// One all-gather for each bucket of a plan, in place: each rank writes its run of the bucket's memory (note [Halves of a sum],
// collectives.h), and receives the others'. Buckets may be on their way at the same time. All ranks start them in the same order.
class Gather {
 public:
  // `interruption`: ends waits, as in a window. `model`: its number, for ranks that gather several models' parameters in different
  // orders.
  Gather(Lanes lanes, c10::Device device, Cut cut, size_t buckets, std::shared_ptr<Interruption> interruption, size_t model);

  // On the current stream, which has written this rank's run of `memory`.
  void start(size_t bucket, const at::Tensor& memory);
  // Returns at once if the bucket is not on its way. On a device with streams only the current stream waits, if the process group
  // allows it.
  void wait(size_t bucket);
  bool is_on_its_way(size_t bucket) const { return pieces_[bucket].wire.defined(); }

 private:
  const Lanes lanes_;
  const c10::Device device_;
  const Cut cut_;
  std::shared_ptr<const Owners> owners_;
  const std::shared_ptr<Interruption> interruption_;
  std::vector<Piece> pieces_;  // by bucket
};

}  // namespace fastddp
