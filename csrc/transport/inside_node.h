// How the ranks of one node exchange a wire before and after it travels between nodes.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace fastddp {

// Note [Inside a node]
// Each rank of the node owns a run of every wire. Runs may differ in length, and may be empty. First each owner gets the sum of
// its run over the ranks of the node, in the wire's dtype (our own sum adds 16 bits up in fp32). Later it sends the result for
// its run to the others. Both are collectives, except over gloo on the CPU: there they are messages between pairs of ranks,
// note [Shards over gloo], transport.h.
//
// All functions start the same works on all ranks of the node, whatever is in the wire. They append each to `piece.works` when
// it has started, and skip the first `piece.sent`. `runs` are parts of `piece.wire`, by rank of the node.
class InsideNode {
 public:
  using Runs = std::vector<at::Tensor>;

  explicit InsideNode(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}
  virtual ~InsideNode() = default;

  virtual void start_sum(Piece& piece, const Runs& runs) const = 0;
  // After start_sum(). The current stream has waited for it.
  virtual void add_up(const Piece& piece, const Runs& runs) const {}
  virtual void start_spread(Piece& piece, const Runs& runs) const = 0;

 protected:
  size_t rank() const { return static_cast<size_t>(group_->getRank()); }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

// The implementation that fits the group, for tensors on this device.
std::unique_ptr<InsideNode> make_inside_node(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device);

}  // namespace fastddp
