#include "bucket/bucket_range.h"

#include <sstream>

namespace fastddp {
namespace {

// Keys are documented in docs/traces.md. Names of parameters have no blanks.
std::string keys_of(const Bucket& bucket, size_t collective) {
  const auto& layout = bucket.layout;
  const auto wire = layout.format().dtype;
  const auto bytes = layout.numbers() * static_cast<int64_t>(c10::elementSize(wire));
  std::ostringstream text;
  text << " bucket=" << layout.index() << " of=" << layout.count() << " collective=" << collective
       << " tick=" << layout.index() + collective << " bytes=" << bytes << " wire=" << dtype_name(wire)
       << " first=" << layout.name(0) << " last=" << layout.name(layout.size() - 1);
  return text.str();
}

}  // namespace

BucketRange::BucketRange(const char* what, const Bucket& bucket, size_t collective)
    : Range(what, [&] { return keys_of(bucket, collective); }) {}

}  // namespace fastddp
