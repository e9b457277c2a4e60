// What profilers show of a step.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

namespace fastddp {

// Note [Names in profilers]
// Each range has a name of the form `fastddp.WHAT key=value ...`, the same in every step as long as buckets are not rebuilt. The
// name goes to torch.profiler (to whatever listens to at::RecordFunction) and to tools that listen to NVTX, like Nsight Systems,
// in a domain `fastddp`. docs/traces.md has the table; fastddp/tools/trace/names.py parses the names.
//
// If nobody listens, a range costs two tests, and its name is not made.

// Whether a tool listens to NVTX. Never, if the extension was compiled without NVTX's headers (compiling.py).
bool nvtx_listens();

// Lasts from construction to destruction, on one thread. Ranges of a thread are nested.
class Range {
 public:
  explicit Range(const std::string& name);
  // `keys()` returns " key=value ...". It is called only if somebody listens.
  template <typename Keys>
    requires std::is_invocable_v<Keys>
  Range(const char* what, const Keys& keys) : Range() {
    if (is_heard()) begin(what, keys());
  }
  ~Range();
  C10_DISABLE_COPY_AND_ASSIGN(Range);

 private:
  Range();
  bool is_heard() const { return nvtx_ || record_.isActive(); }
  void begin(const std::string& name);
  void begin(const char* what, const std::string& keys);

  at::RecordFunction record_;
  const bool nvtx_;
};

// torch's name of the dtype.
const char* dtype_name(c10::ScalarType dtype);

// Lasts from begin() to end(), whatever other ranges do meanwhile. NVTX has such ranges. torch.profiler has none, and shows the
// moment of begin().
class LongRange {
 public:
  explicit LongRange(const char* what) : what_(what) {}
  ~LongRange() { end(); }
  C10_DISABLE_COPY_AND_ASSIGN(LongRange);

  void begin();
  void end();

 private:
  const char* what_;
  std::optional<uint64_t> nvtx_;
};

}  // namespace fastddp
