// Every wait of one stream for another that fastddp makes, and every use of memory by a stream that its allocator has to
// know of, is a function of this file. Process groups make two more: their own stream waits for the current one when a
// collective is started, and the current one for theirs in Work::wait. In Python the sum of the weights has a stream of its own
// (fastddp/exchange/gradient_average.py), for which nothing waits but the host.
//
// Built on c10's device-agnostic guards and events, so that the extension compiles without CUDA headers. Devices that
// compute on the host (CPU) have no streams: for them c10 has no events either, and every function here does nothing.
//
// Note [Order on the device]
//   gradient written (any stream) -> pack: the current stream waits for all producers
//   pack -> collective: the process group, at the start
//   collective -> unpack: a side stream waits, as soon as the collective has been started, so that unpack overlaps what
//     is left of backward and the host waits for nothing
//   pack -> a collective that carries later stages of other buckets too: the side stream that starts it waits for pack's
//   unpack, collective -> whatever follows backward: the caller's stream waits for the side stream, once
// What the next window does to the wires comes after its forward, which comes after this join.
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
// AccumulateGrad runs on the stream that was current when its node was made, so the gradients of one bucket may come
// from several streams. Each gradient hook notes the stream it runs on; pack then runs on the stream of the gradient
// that completed the bucket, after it was made to wait for all the others.
class Producers {
 public:
  void note(c10::Device device);
  // Makes the current stream wait for everything that the producers have been given up to now.
  void current_stream_waits(c10::Device device) const;
  void clear();

 private:
  std::vector<c10::Stream> streams_;
};

// Keeps the tensor's memory from being given out again before the current stream has done what it was given up to the
// moment in which the last reference goes: the allocator knows only the stream that the memory was allocated on.
void keep_for_current_stream(const at::Tensor& tensor);

// Note [Kept until the join]
// Side streams write gradients, whose memory belongs to the stream of their backward. An allocator that is told of such a use
// gives the memory out again only when it has seen that the side stream is done. A device lags behind the host, so this has not
// been seen when the next step allocates its gradients. They would get other addresses in every step, and the tables by which
// kernels know them would be uploaded in every step. So the allocator is not told. A reference to the memory is kept instead,
// until the caller's stream has waited for the side stream. Whoever frees the memory after that does so behind its last use.
class KeptUntilJoin {
 public:
  KeptUntilJoin() = default;
  KeptUntilJoin(KeptUntilJoin&&) = default;
  KeptUntilJoin& operator=(KeptUntilJoin&&) = default;
  ~KeptUntilJoin() { let_go(); }

  // The current stream uses the tensor's memory.
  void add(const at::Tensor& tensor);
  // The current streams have waited for those that used it. Memory that belongs to neither is kept for these.
  void release_after_join();
  // There is no such wait, or it comes too late: the allocator is told of the uses after all.
  void let_go();

 private:
  struct Use {
    c10::Storage memory;
    c10::Stream by;
  };
  std::vector<Use> uses_;
};

// The streams on which everything runs that follows a collective: one for each device that a reducer has buckets on.
class SideStreams {
 public:
  void add(c10::Device device);

  // Makes them current for as long as the guard lives.
  c10::MultiStreamGuard make_current() const;

  // Makes them wait for everything that the current stream of their device was given.
  void wait_for_current_streams() const;

  // Makes the current stream of each device wait for everything that its side stream was given.
  void current_streams_wait() const;

  // Makes the host wait for everything they were given: only where a window has failed.
  void synchronize() const;

 private:
  std::vector<c10::Stream> streams_;
};

// A moment on the time line of a device: when its current stream gets here, or, where computing is the host's, now.
class Moment {
 public:
  static Moment now(c10::Device device);
  // The same where only has_passed() is asked: without a time, which a device takes longer to write.
  static Moment without_time(c10::Device device);

  // From `earlier`, a moment of the same device, to this one. The host waits for both.
  double seconds_since(const Moment& earlier) const;
  // Whether its stream has got here, so that nobody waits for it.
  bool has_passed() const;

 private:
  Moment(c10::Device device, bool has_time);

  std::shared_ptr<c10::Event> event_;  // none: on the host
  c10::Device device_;
  std::chrono::steady_clock::time_point time_;
};

}  // namespace fastddp
