// The trip that follows from a way.
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include "trip/stage.h"
#include "trip/way.h"

namespace fastddp {

// Sets the formats of the buckets' wires, and fills `travels`. None: the way was made for other buckets. `slabs`: the places for
// wires that do not exist yet; null: no such memory. `lock`: the reducer's, which hooks release.
std::optional<Trip> make_trip(const Way& way, std::vector<Bucket>& buckets, std::vector<Travel>& travels, Slabs* slabs,
                              std::mutex& lock);

}  // namespace fastddp
