// What profilers show of a bucket: note [Names in profilers], observe/ranges.h.
#pragma once

#include "bucket/bucket.h"
#include "observe/ranges.h"

namespace fastddp {

class BucketRange : public Range {
 public:
  // `collective`: the number of the one among the bucket's that it is about.
  BucketRange(const char* what, const Bucket& bucket, size_t collective = 0);
};

}  // namespace fastddp
