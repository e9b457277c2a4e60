// What the kernel knows of this process' TCP connections: whether the other side answers, and whether bytes move.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fastddp {

// Note [Links]
// Where a network is down, ranks wait as they do for a rank that hangs. The kernel can tell them apart: it acknowledges what
// comes for a process that is stopped or stuck, and nothing that the network has lost. This is of the connections that the
// process has made itself, whoever did it: gloo, NCCL over sockets, the store. It takes no right and no byte on the network;
// where gradients travel by RDMA, it tells nothing of them.
class Links {
 public:
  // Goes over all connections. Not in steps that end: it takes a call of the kernel for each open file.
  void look();

  // Addresses to which something was sent again and again, and that have not acknowledged it; as of the last look.
  const std::set<std::string>& unanswered() const { return unanswered_; }
  // Bytes a second, there and back, that were acknowledged or came in the last second or so; loopback not counted.
  double moved() const { return moved_; }

 private:
  using Clock = std::chrono::steady_clock;

  std::set<std::string> unanswered_;
  std::map<uint64_t, uint64_t> bytes_;  // by socket
  Clock::time_point counted_;
  double moved_ = 0;
};

}  // namespace fastddp
