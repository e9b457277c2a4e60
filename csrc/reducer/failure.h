// What is said of a window that failed, and by whom.
#pragma once

#include <cstddef>
#include <string>

namespace fastddp {

// One object, for the last window that failed. Steps are numbered from 1, as users count synchronised steps.
class Failure {
 public:
  // How the next forward says it, if nobody has asked until then. Where backward raised, or was going to, its caller knows.
  enum class Unsaid { nothing, warning, error };

  void happened_here(const std::string& what, size_t step, int rank);
  void happened_elsewhere(const std::string& what, size_t step, int rank);
  // The same, known only after backward has returned.
  void found_later(const std::string& what, size_t step, int rank);

  const std::string& text() const { return text_; }
  // To somebody who asks, and so says it.
  const std::string& tell();
  Unsaid take_unsaid();

 private:
  std::string text_;
  Unsaid unsaid_ = Unsaid::nothing;
};

}  // namespace fastddp
