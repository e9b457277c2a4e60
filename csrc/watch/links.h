// What the kernel knows of this process' TCP connections: whether the other side answers, and whether bytes move.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fastddp {

// A network that carries less is broken. What ranks write to the store when a step stands still is less.
inline bool carries_bytes(double a_second) {
  return a_second > 2048;
}

// Note [Links]
// Where a network is down, ranks wait as they do for a rank that hangs. The kernel can tell them apart: it acknowledges what
// comes for a process that is stopped or stuck, and nothing that the network has lost. This is of the connections that the
// process has made itself, whoever did it: gloo, NCCL over sockets, the store. It takes no right. Where gradients travel by
// RDMA, it tells nothing of them.
//
// A rank that only waits to receive sends nothing that could be acknowledged. So while a step stands still the kernel is told to
// ask for it: TCP's keepalive, an empty packet a second on each connection. It ends a connection after 127 of them without an
// answer, and nothing of ours may: whoever asks has to leave in time.
class Links {
 public:
  ~Links() { leave(); }

  // Goes over all connections. Not in steps that end: it takes a call of the kernel for each open file.
  void look();
  // From the next look on, until leave(): lets the kernel ask on connections where nobody else has told it to.
  void ask() { asks_ = true; }
  void leave();

  // Addresses that have not acknowledged what was sent to them again and again; as of the last look.
  const std::set<std::string>& unanswered() const { return unanswered_; }
  // Bytes a second, there and back, that were acknowledged or came in the last second or so; loopback not counted.
  double moved() const { return moved_; }

 private:
  using Clock = std::chrono::steady_clock;

  bool asks_ = false;
  std::map<int, uint64_t> asked_;  // descriptors, and their sockets
  std::set<std::string> unanswered_;
  std::map<uint64_t, uint64_t> bytes_;  // by socket
  Clock::time_point counted_;
  double moved_ = 0;
};

}  // namespace fastddp
