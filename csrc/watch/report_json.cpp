// A report for machines: names of causes, JSON.
#include <array>
#include <cstdio>
#include <string>

#include "watch/diagnosis.h"

namespace fastddp {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', static_cast<char>(c)};
    } else if (c < 0x20) {
      std::array<char, 8> code{};
      std::snprintf(code.data(), code.size(), "\\u%04x", c);
      out += code.data();
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + '"';
}

template <typename Things, typename Write>
std::string array(const Things& things, const Write& write) {
  std::string out;
  for (const auto& thing : things) out += (out.empty() ? "" : ", ") + write(thing);
  return "[" + out + "]";
}

}  // namespace

const char* to_string(Cause cause) {
  constexpr std::array names{"gone",        "stopped",       "uninterruptible", "network",
                             "silent",      "outside",       "forward",         "loss",
                             "hook",        "backward",      "other_graph",     "after_backward",
                             "optimizer",   "windows_apart", "other_shapes",    "other_collective",
                             "other_order", "slow"};
  return names.at(static_cast<size_t>(cause));
}

std::string Report::json() const {
  const auto number = [](int value) { return std::to_string(value); };
  return "{\"version\": 1, \"step\": " + std::to_string(step) + ", \"ranks\": " + std::to_string(ranks) +
         ", \"headline\": " + quoted(headline) + ", \"findings\": " +
         array(findings,
               [&](const Finding& finding) {
                 return "{\"cause\": " + quoted(to_string(finding.cause)) +
                        ", \"ranks\": " + array(finding.ranks, number) + ", \"text\": " + quoted(finding.text) + "}";
               }) +
         ", \"stack\": " + array(stack, quoted) + ", \"message\": " + quoted(text()) + "}";
}

}  // namespace fastddp
