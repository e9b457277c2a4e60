// Copies part of a wire as it was sent and as it came back, for a second sum of the same numbers.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "transport/transport.h"

namespace fastddp {

// Note [Sums that are checked]
// A sum is checked against a second sum of the same numbers, which travel another way and are added up by other code. For that,
// elements [begin, end) of one wire are copied before the wire is sent, and again when the ranks' sum has come. The caller of
// ask() takes both copies when the window is over, on all ranks alike. Pipeline and reducer know nothing of the audit, and it
// does not change what travels in the window.
class SumAudit {
 public:
  // Asks for these elements of the next window, and forgets what was asked before.
  void ask(size_t wire, int64_t begin, int64_t end);

  struct Copies {
    at::Tensor sent, came;  // [end - begin], in the wire's dtype; safe to use on the current stream
    double factor;          // the collective itself has multiplied by it
  };
  // None: nothing was asked for, or the window did not complete on this rank.
  std::optional<Copies> take();

  // Called by the transport, on the streams on which its own functions run.
  void note_sent(const Piece& piece);
  void note_came(const Piece& piece, double factor);

 private:
  struct Copy {
    at::Tensor elements;
    int64_t count = 0;
  };
  void copy_part(const Piece& piece, Copy& copy) const;
  bool is_complete(const Copy& copy) const { return copy.count == end_ - begin_; }

  std::mutex mutex_;  // the thread that runs forward calls ask() and take()
  bool asked_ = false;
  size_t wire_ = 0;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  Copy sent_, came_;
  double factor_ = 1.0;
};

// Wraps `transport`, so that `audit` sees the wires that it sends and the sums that come.
std::unique_ptr<Transport> make_audited(std::shared_ptr<Transport> transport, std::shared_ptr<SumAudit> audit);

}  // namespace fastddp
