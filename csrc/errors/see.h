// How an error's text ends: with the code under which fastddp/errors.py explains it.
#pragma once

#include <array>
#include <cstddef>
#include <ostream>
#include <string>
#include <string_view>

namespace fastddp {

class See {
 public:
  constexpr explicit See(const char (&code)[6]) {
    size_t end = 0;
    for (const auto part : {std::string_view(" ["), std::string_view(code, 5), std::string_view(": fastddp explain "),
                            std::string_view(code, 5), std::string_view("]")}) {
      for (const auto letter : part) text_[end++] = letter;
    }
  }

  constexpr std::string_view text() const { return {text_.data(), text_.size()}; }

 private:
  std::array<char, 31> text_{};
};

// see("FD010") is " [FD010: fastddp explain FD010]".
constexpr See see(const char (&code)[6]) {
  return See(code);
}

static_assert(see("FD010").text() == " [FD010: fastddp explain FD010]");

inline std::ostream& operator<<(std::ostream& out, const See& end) {
  return out << end.text();
}

inline std::string operator+(std::string text, const See& end) {
  return text.append(end.text());
}

}  // namespace fastddp
