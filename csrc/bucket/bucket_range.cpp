#include "bucket/bucket_range.h"

#include <sstream>

namespace fastddp {
namespace {

// Keys are documented in docs/traces.md. Names of parameters have no blanks.
std::string keys_of(const Bucket& bucket, size_t collective) {
  const auto bytes = bucket.elements() * static_cast<int64_t>(c10::elementSize(bucket.wire_dtype));
  std::ostringstream text;
  text << " bucket=" << bucket.index << " of=" << bucket.count << " collective=" << collective
       << " tick=" << bucket.index + collective << " bytes=" << bytes << " wire=" << dtype_name(bucket.wire_dtype)
       << " first=" << bucket.names.front() << " last=" << bucket.names.back();
  return text.str();
}

}  // namespace

BucketRange::BucketRange(const char* what, const Bucket& bucket, size_t collective)
    : Range(what, [&] { return keys_of(bucket, collective); }) {}

}  // namespace fastddp
