// The layout of a page. Other processes read it, so a change here changes kVersion.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pages/snapshot.h"

namespace fastddp::page {

inline constexpr uint64_t kMagic = 0x70646474736166;  // "fastddp"
inline constexpr uint32_t kVersion = 9;
inline constexpr size_t kMostBuckets = 1024;  // later ones are not noted
inline constexpr size_t kSteps = 16;
inline constexpr size_t kLanes = Snapshot::kLanes;

using Number = std::atomic<uint32_t>;
using Time64 = std::atomic<uint64_t>;  // ns of the machine's monotonic clock; 0: never
static_assert(Number::is_always_lock_free && Time64::is_always_lock_free);

// Both in one number, so that they are read together.
inline constexpr int kTimeBits = 56;  // two years
inline uint64_t packed(const Moment& moment) {
  return static_cast<uint64_t>(moment.what) << kTimeBits | moment.time;
}
inline Moment moment_of(uint64_t packed) {
  return {What(packed >> kTimeBits), std::nullopt, packed & ((uint64_t{1} << kTimeBits) - 1)};
}

// Windows are counted modulo 2^30.
inline uint64_t packed(const DeviceWait& wait) {
  return uint64_t{wait.window} << 34 | uint64_t{wait.bucket & 0xffffffff} << 2 | uint64_t{wait.of_parameters} << 1 |
         uint64_t{wait.has_begun};
}
inline std::optional<DeviceWait> unpacked(uint64_t wait) {
  if (wait == 0) return std::nullopt;
  return DeviceWait{wait >> 34, wait >> 2 & 0xffffffff, (wait & 1) != 0, (wait & 2) != 0};
}

// Written once, after the rest of the page has been set up. `magic` to `process` are in this place in each version.
struct Header {
  uint64_t magic;
  uint32_t version, number;
  Process process;
  int32_t rank, ranks;
  uint32_t parameters, buckets, name_bytes;
  std::array<char, 64> host;
};

struct alignas(64) Live {
  std::atomic<uint64_t> job, doing, gradients, sequence;
  std::atomic<uint64_t> device_wait;  // packed(); 0: it waits for nothing
  Time64 device_since;
  Number doing_bucket, state, windows, buckets, tick, finished, last_parameter, runs_user_code, ends, failed_window, generation;
  std::array<Time64, kSteps> step_ends;  // by the step's number, modulo kSteps
  std::array<char, 128> script;          // that the process runs, once `job` is set; ends with 0
  std::array<char, 256> error;           // why the process ends, once `ends` is set; ends with 0
};

struct BucketRow {
  Time64 started;
  std::atomic<uint64_t> bytes;
  std::array<std::array<std::atomic<uint64_t>, 2>, kLanes> collectives;  // first and last of each lane; first > last: none
};

struct ParameterRow {
  Number window;  // the last window in which its gradient has come
  Number bucket;
};

// Where each part of a page begins.
struct Rooms {
  explicit Rooms(const Header& header)
      : buckets(live + sizeof(Live)),
        parameters(buckets + header.buckets * sizeof(BucketRow)),
        names(parameters + header.parameters * sizeof(ParameterRow)),
        bytes(names + header.name_bytes) {}

  static constexpr size_t live = sizeof(Header) + (-sizeof(Header) & 63);
  const size_t buckets, parameters, names, bytes;
};

// On the clock of moments.
inline uint64_t now() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

Pulse pulse_of(const Live& live);
// The last steps, in seconds.
std::vector<double> steps_of(const Live& live);

}  // namespace fastddp::page
