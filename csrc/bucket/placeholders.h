// What travels in place of gradients that may not come: note [Placeholders], bucket_window.h.
#pragma once

#include "bucket/bucket.h"

namespace fastddp {

// From now on a placeholder travels in place of the member's gradient. It has the gradient's values if these `counts`, else zeros.
void use_placeholder(Bucket& bucket, size_t member, bool counts);
// The same for each member for which `which(member)` is true and that has no placeholder yet.
template <typename Which, typename Counts>
void use_placeholders(Bucket& bucket, const Which& which, const Counts& counts) {
  for (size_t member = 0; member < bucket.size(); ++member) {
    if (bucket.window[member].has_placeholder() || !which(member)) continue;
    use_placeholder(bucket, member, counts(bucket.layout.parameter(member)));
  }
}
// A gradient came nevertheless: autograd has added `incoming` to what the parameter had. Undefined: a layer has written it.
void note_unexpected(Bucket& bucket, size_t member, const at::Tensor& incoming);
// The gradient that the placeholder leaves out; undefined: none.
at::Tensor left_out(const Bucket& bucket, size_t member);
// Ends the placeholder. If anybody `used` the parameter, the gradient becomes what has come back for the placeholder.
void resolve_placeholder(Bucket& bucket, size_t member, bool used);
// Adds to the member's average: it is the average of `late`, in the place of that bucket's member `from`.
void add_late(Bucket& bucket, size_t member, const Bucket& late, size_t from);

}  // namespace fastddp
