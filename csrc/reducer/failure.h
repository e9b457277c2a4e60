// What is said about a failed window, and by whom.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace fastddp {

// The last window that failed. Steps are numbered from 1, as users count synchronised steps.
class Failure {
 public:
  // What the next forward does with the text. A warning follows another error that the user has had; an error is news.
  enum class Unsaid { nothing, warning, error };

  void happened_here(const std::string& what, size_t step, int rank);
  void happened_elsewhere(const std::string& what, size_t step, int rank);
  // It happened elsewhere, but became known only after backward had returned.
  void found_later(const std::string& what, size_t step, int rank);

  const std::string& text() const { return text_; }
  // For somebody who asks: an error counts as said then.
  const std::string& tell() {
    if (unsaid_ == Unsaid::error) unsaid_ = Unsaid::nothing;
    return text_;
  }
  Unsaid take_unsaid() { return std::exchange(unsaid_, Unsaid::nothing); }

 private:
  std::string text_;
  Unsaid unsaid_ = Unsaid::nothing;
};

}  // namespace fastddp
