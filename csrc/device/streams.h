// The functions in this file make all waits of fastddp's streams for each other, and tell allocators which streams use memory.
// Process groups make two more waits: their own stream waits for the current one when a collective is started, and the current
// one waits for theirs in Work::wait. In Python the sum of the weights has a stream of its own
// (fastddp/window/gradient_average.py), for which only the host waits.
//
// They use c10's device-agnostic guards and events, so that the extension compiles without CUDA headers. Devices that compute on
// the host (CPU) have no streams, and c10 has no events for them. For these devices the functions order nothing.
//
// Note [Order on the device]
//   gradient written (any stream) -> pack: the current stream waits for all producers
//   pack -> collective: the process group waits, at the start
//   collective -> unpack: a side stream waits, as soon as the collective has been started. So unpack overlaps the rest of
//     backward, and the host waits for nothing
//   pack -> a collective that also carries later legs of other buckets: the side stream that starts it waits for pack's
//   unpack, collective -> whatever follows backward: the caller's stream waits for the side stream, once
// The next window uses the wires after its forward, and that comes after this join.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <memory>
#include <vector>

namespace fastddp {

bool has_streams(c10::Device device);

// Note [Producers]
// AccumulateGrad runs on the stream that was current when its node was made, so the gradients of one bucket may come from several
// streams. Each gradient hook notes its stream. Pack runs on the stream of the gradient that completed the bucket, after that
// stream was made to wait for all others.
class Producers {
 public:
  void note(c10::Device device);
  // Makes the current stream wait for everything that the producers have been given so far.
  void current_stream_waits(c10::Device device) const;
  void clear() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;
};

// Tells the allocator, which knows only the stream that the memory was allocated on, that the current stream uses it. When the
// last reference goes, the memory is given out again only after the current stream has done all its work up to then.
void keep_for_current_stream(const at::Tensor& tensor);

// Note [Kept until the join]
// Side streams write gradients, whose memory belongs to the stream of their backward. An allocator that is told of such a use
// gives the memory out again only when it has seen that the side stream is done. A device lags behind the host, so the allocator
// has not seen this when the next step allocates its gradients. They would get other addresses in every step, and the tables by
// which kernels know them would be uploaded in every step. So the allocator is not told. Instead a reference to the memory is
// kept until the caller's stream has waited for the side stream. Memory freed after that has had its last use.
class KeptUntilJoin {
 public:
  KeptUntilJoin() = default;
  KeptUntilJoin(KeptUntilJoin&&) = default;
  KeptUntilJoin& operator=(KeptUntilJoin&&) = default;
  ~KeptUntilJoin() { let_go(); }

  // The current stream uses the tensor's memory.
  void add(const at::Tensor& tensor);
  // The current streams have waited for the streams that used it. Memory of a third stream is kept for the current ones.
  void release_after_join();
  // Tells the allocator of the uses after all: there is no such wait, or it comes too late.
  void let_go();

 private:
  struct Use {
    c10::Storage memory;
    c10::Stream by;
  };
  std::vector<Use> uses_;
};

// Side streams run everything that follows a collective. There is one for each device on which a reducer has buckets.
class SideStreams {
 public:
  void add(c10::Device device);

  // Makes the side streams current as long as the guard lives.
  c10::MultiStreamGuard make_current() const;

  // Makes each side stream wait for everything that the current stream of its device was given.
  void wait_for_current_streams() const;

  // Makes the current stream of each device wait for everything that its side stream was given.
  void current_streams_wait() const;

  // Makes the host wait for everything that the side streams were given: only where a window has failed.
  void synchronize() const;

 private:
  std::vector<c10::Stream> streams_;
};

// A moment in the work of a device: when its current stream gets here. Where the host computes: now.
class DeviceMoment {
 public:
  static DeviceMoment now(c10::Device device);
  // The same, for has_passed() only: without a time, which a device takes longer to write.
  static DeviceMoment without_time(c10::Device device);

  // Seconds since `earlier`, a moment of the same device. The host waits for both.
  double seconds_since(const DeviceMoment& earlier) const;
  // Whether the stream has got here. The host does not wait.
  bool has_passed() const;

 private:
  DeviceMoment(c10::Device device, bool has_time);

  std::shared_ptr<c10::Event> event_;  // null: on the host
  c10::Device device_;
  std::chrono::steady_clock::time_point time_;
};

}  // namespace fastddp
