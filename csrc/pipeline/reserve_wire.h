#pragma once

#include "bucket/bucket.h"
#include "transport/registered_memory.h"

namespace fastddp {

// Reserves a place for a wire that does not exist yet and is not lent: note [Memory of wires], bucket/wire_memory.h. `slabs` may
// be null. `may_be_symmetric`: if a window fails, the exchange writes what it sends instead into this wire.
inline void reserve_wire(Bucket& bucket, c10d::ProcessGroup& group, Slabs* slabs, bool may_be_symmetric = false) {
  bucket.wire.comes_from(nullptr);
  if (slabs == nullptr || bucket.wire.exists() || bucket.lends_wire()) return;
  if (slabs->are_symmetric() && !may_be_symmetric) return;
  const auto bytes = Slabs::bytes(bucket.layout.wire_length(), bucket.layout.format().dtype);
  bucket.wire.comes_from(slabs->reserve(group, bucket.device(), bytes));
}

}  // namespace fastddp
