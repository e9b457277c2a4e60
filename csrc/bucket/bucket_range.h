// What profilers show of a bucket: note [Names in profilers], observe/ranges.h.
#pragma once

#include "bucket/bucket.h"
#include "observe/ranges.h"

namespace fastddp {

class BucketRange : public Range {
 public:
  // `collective`: which of the bucket's collectives the range is about.
  BucketRange(const char* what, const Bucket& bucket, size_t collective = 0);
};

}  // namespace fastddp
