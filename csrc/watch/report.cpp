#include "watch/report.h"

#include <array>
#include <cstdio>
#include <ctime>

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
  constexpr std::array names{
      "gone",          "stopped",      "uninterruptible",  "network",     "silent",      "outside",        "forward",
      "loss",          "hook",         "backward",         "device",      "other_graph", "after_backward", "optimizer",
      "windows_apart", "other_shapes", "other_collective", "other_order", "slow"};
  return names.at(static_cast<size_t>(cause));
}

std::string named(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

std::string time_of_day(int64_t ms) {
  const std::time_t seconds = ms / 1000;
  std::tm local{};
  localtime_r(&seconds, &local);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%F %T%z", &local);
  return text.data();
}

std::string formatted(const char* format, double number) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), format, number);
  return text.data();
}

std::string Report::text(bool with_stack) const {
  std::string out = "fastddp: " + headline + " (" + time + ")";
  for (const auto& finding : findings) {
    out += "\n  ";
    if (finding.ranks.size() > 1) out += "each of ";
    if (!finding.ranks.empty()) out += named(finding.ranks) + " ";
    out += finding.text;
  }
  if (!with_stack || stack.empty()) return out;
  out += "\n  Python code of " + named({findings.front().ranks.front()}) + ":";
  for (const auto& line : stack) out += "\n    " + line;
  return out;
}

std::string Report::json() const {
  const auto number = [](int value) { return std::to_string(value); };
  return "{\"version\": 1, \"step\": " + std::to_string(step) + ", \"ranks\": " + std::to_string(ranks) +
         ", \"time\": " + quoted(time) + ", \"headline\": " + quoted(headline) + ", \"causes\": " +
         array(findings,
               [&](const Finding& finding) {
                 return "{\"cause\": " + quoted(to_string(finding.cause)) + ", \"ranks\": " + array(finding.ranks, number) +
                        ", \"text\": " + quoted(finding.text) + "}";
               }) +
         ", \"stack\": " + array(stack, quoted) + ", \"is_soft\": " + (is_soft() ? "true" : "false") +
         ", \"message\": " + quoted(text()) + "}";
}

}  // namespace fastddp
