// Part of a wire as it was sent and as it came back, for whoever adds it up a second time.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "transport/transport.h"

namespace fastddp {

// Note [Sums that are checked]
// A sum is checked against another one of the same numbers, which travel by another way and are added up by other code. For
// that, elements [begin, end) of one wire are copied before it is sent, and once more when the ranks' sum has come. Who asked
// for them takes both copies when the window is over, on all ranks alike. Pipeline and reducer know nothing of it, and what
// travels in the window is what would travel anyway.
class SumAudit {
 public:
  // In the window that comes; what was asked for before is forgotten.
  void ask(size_t wire, int64_t begin, int64_t end);

  struct Copies {
    at::Tensor sent, came;  // [end - begin], in the wire's dtype; they belong to the current streams
    double factor;          // by which the collective itself has multiplied
  };
  // None: nothing was asked for, or the window has not gone to its end on this rank.
  std::optional<Copies> take();

  // By the transport, on the streams of which it is called.
  void note_sent(const Piece& piece);
  void note_came(const Piece& piece, double factor);

 private:
  struct Copy {
    at::Tensor elements;
    int64_t count = 0;
  };
  void copy_part(const Piece& piece, Copy& copy) const;
  bool is_complete(const Copy& copy) const { return copy.count == end_ - begin_; }

  std::mutex mutex_;  // asked and taken by the thread that runs forward
  bool asked_ = false;
  size_t wire_ = 0;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  Copy sent_, came_;
  double factor_ = 1.0;
};

// `transport`, and `audit` sees what it sends and what comes.
std::unique_ptr<Transport> make_audited(std::shared_ptr<Transport> transport, std::shared_ptr<SumAudit> audit);

}  // namespace fastddp
