// The trip that follows from a way.
#pragma once

#include <vector>

#include "trip/stage.h"
#include "trip/way.h"

namespace fastddp {

// Fills `travels`, and changes nothing else: note [All or nothing], bucket/bucket.h. Raises if the way was made for other buckets.
// `slabs`: the places for wires that do not exist yet; null: no such memory.
Trip make_trip(const Way& way, std::vector<Bucket>& buckets, std::vector<Travel>& travels, Slabs* slabs);

}  // namespace fastddp
