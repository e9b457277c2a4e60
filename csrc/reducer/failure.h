// What is said about a failed window, and by whom.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace fastddp {

// The last window that failed. Windows are numbered from 0; users count synchronised steps from 1.
class Failure {
 public:
  explicit Failure(int rank) : rank_(rank) {}

  // What the next forward does with the text. A warning follows another error that the user has had; an error is news.
  enum class Unsaid { nothing, warning, error };

  void happened_here(const std::string& what, size_t window);
  void happened_elsewhere(const std::string& what, size_t window);
  // It happened elsewhere, but became known only after backward had returned.
  void found_later(const std::string& what, size_t window);

  const std::string& text() const { return text_; }
  // For somebody who asks: an error counts as said then.
  const std::string& tell() {
    if (unsaid_ == Unsaid::error) unsaid_ = Unsaid::nothing;
    return text_;
  }
  Unsaid take_unsaid() { return std::exchange(unsaid_, Unsaid::nothing); }

 private:
  const int rank_;
  std::string text_;
  Unsaid unsaid_ = Unsaid::nothing;
};

}  // namespace fastddp
