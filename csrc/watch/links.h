// What the kernel knows of this process's TCP connections: whether the other side answers, and whether bytes move.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fastddp {

// A network that carries less is broken. Ranks write less than this to the store when a step stands still.
inline bool carries_bytes(double a_second) {
  return a_second > 2048;
}

// Note [Links]
// While a network is down, ranks wait just as they do for a rank that hangs. The kernel can tell the two apart: it acknowledges
// what comes for a process that is stopped or stuck, but not what the network has lost. We look at the connections of this
// process, whoever opened them: gloo, NCCL over sockets, the store. That takes no privileges. Where gradients travel by RDMA,
// it tells nothing about them.
//
// A rank that only waits to receive sends nothing that could be acknowledged. So while a step stands still we let the kernel
// ask: TCP's keepalive sends an empty packet a second on each connection. The kernel ends a connection after 127 of them
// without an answer. We must never cause that: whoever asks has to leave in time.
class Links {
 public:
  ~Links() { leave(); }

  // Looks at all connections, with a system call for each open file. So it is not called while steps end as usual.
  void look();
  // From the next look on, until leave(): lets the kernel ask on connections where nobody else does.
  void ask() { asks_ = true; }
  void leave();

  // Addresses that have not acknowledged what was sent to them several times; as of the last look.
  const std::set<std::string>& unanswered() const { return unanswered_; }
  // Bytes a second that were sent and acknowledged, or received, in the last second or so; without loopback.
  double moved() const { return moved_; }

 private:
  using Clock = std::chrono::steady_clock;

  bool asks_ = false;
  std::map<int, uint64_t> asked_;  // by descriptor: its socket
  std::set<std::string> unanswered_;
  std::map<uint64_t, uint64_t> bytes_;  // by socket
  Clock::time_point counted_;
  double moved_ = 0;
};

}  // namespace fastddp
