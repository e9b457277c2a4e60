#include "window/usage.h"

#include <algorithm>

namespace fastddp {

Usage::Usage(size_t parameters, Expect expect)
    : expect_(expect),
      learning_(expect != Expect::all),
      expected_(parameters, 1),
      hooks_(parameters, 0),
      learned_(parameters, 0),
      used_(parameters, expect == Expect::all ? Used::yes : Used::no),
      ever_used_(used_) {}

void Usage::begin_window() {
  std::ranges::fill(hooks_, 0);
}

Usage::Hook Usage::count(size_t parameter) {
  const auto hooks = ++hooks_[parameter];
  if (!waits_for(parameter)) return Hook::unexpected;
  if (hooks < expected_[parameter]) return Hook::more_to_come;
  return hooks == expected_[parameter] ? Hook::last : Hook::too_many;
}

void Usage::learn(std::vector<Used> used) {
  see(std::move(used));
  if (expect_ == Expect::as_last) learn_from_last();
}

void Usage::see(std::vector<Used> used) {
  used_ = std::move(used);
  if (expect_ == Expect::as_first) return learn_from_first(used_);
  ever_used_ = used_;
}

// Where the number of hooks changes from window to window, the greatest is waited for: a gradient that was taken for final
// too early may have moved into a wire.
void Usage::learn_from_last() {
  for (size_t parameter = 0; parameter < hooks_.size(); ++parameter) {
    learned_[parameter] = std::max(learned_[parameter], hooks_[parameter]);
    expected_[parameter] = hooks_[parameter] > 0 ? learned_[parameter] : 0;
  }
  learning_ = false;
}

void Usage::learn_from_first(const std::vector<Used>& used) {
  for (size_t parameter = 0; parameter < hooks_.size(); ++parameter) {
    learned_[parameter] += hooks_[parameter];
    ever_used_[parameter] = std::max(ever_used_[parameter], used[parameter]);
  }
  known_ = true;
}

void Usage::fix() {
  if (!learning_) return;
  expected_ = learned_;
  used_ = ever_used_;
  learning_ = false;
}

}  // namespace fastddp
