// Which gradients a window waits for, which it got, and what all ranks together used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastddp {

// Note [Expected gradients]
// A bucket starts to travel when every gradient that it waits for is final. A parameter's gradient is final when its hook
// has run as often as expected: once, or once for each reentrant checkpoint that uses the parameter.
//
//   all       every parameter, once
//   as_last   the parameters of this rank's last window (find_unused_parameters)
//   as_first  the parameters of the first one (static_graph); what no rank used then is in no bucket
//
// As long as nothing is known, buckets start when backward ends. A backward that was expected to be as the last one may
// differ: what did not come is settled when it ends, and what came behind its bucket travels late (note [Late gradients],
// reducer.h).
enum class Expect { all, as_last, as_first };

// Of one parameter in one window. Over ranks the greatest counts.
enum class Used : uint8_t {
  no = 0,
  yes = 1,
  late = 2,  // and its gradient came behind its bucket
};

class Usage {
 public:
  Usage(size_t parameters, Expect expect);

  // Whether every window has to bring every gradient.
  bool is_known_beforehand() const {
    return expect_ == Expect::all;
  }

  // Whether nothing is known yet.
  bool is_learning() const {
    return learning_;
  }

  // Whether what is learned holds for all coming windows.
  bool is_for_good() const {
    return expect_ == Expect::as_first;
  }

  // Whether the end of a backward ends its window, whatever came. Ranks then exchange what they used.
  bool settles_at_end() const {
    return expect_ == Expect::as_last || learning_;
  }

  bool waits_for(size_t parameter) const {
    return !learning_ && expected_[parameter] > 0;
  }

  void begin_window();

  // What it means for a gradient that its hook ran in a backward that synchronises.
  enum class Hook { more_to_come, last, unexpected, too_many };
  Hook count(size_t parameter);

  bool is_final(size_t parameter) const {
    return waits_for(parameter) && hooks_[parameter] >= expected_[parameter];
  }

  // The window has ended, on this rank without a failure: what came is what is expected from now on. `used`: by any rank.
  void learn(std::vector<Used> used);

  // A window in which this rank had no part.
  void see(std::vector<Used> used);

  // In the last window; as_first, once that is fixed: in the first step.
  Used used(size_t parameter) const {
    return used_[parameter];
  }
  // As_first: in any window that was learned from; else in the last one.
  bool ever_used(size_t parameter) const {
    return ever_used_[parameter] != Used::no;
  }

  // as_first: whether a window went well on all ranks, and what came is to be expected from now on.
  bool is_known() const {
    return known_;
  }
  void fix();

 private:
  void learn_from_last();
  void learn_from_first(const std::vector<Used>& used);

  Expect expect_;
  bool learning_;
  bool known_ = false;
  std::vector<uint32_t> expected_;  // hooks; 0: the parameter is not waited for
  std::vector<uint32_t> hooks_;     // of this window
  std::vector<uint32_t> learned_;   // as_last: the most ever; as_first: those of the first step, whose backwards add up
  std::vector<Used> used_;
  std::vector<Used> ever_used_;
};

}  // namespace fastddp
