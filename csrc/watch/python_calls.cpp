#include "watch/python_calls.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "watch/report.h"

namespace fastddp {
namespace {

constexpr size_t kMostLines = 12;

using Calls = std::vector<PythonCall>::const_iterator;

// The longest folder of a library that holds the file; null: the file is the user's.
const Libraries::value_type* library_of(const std::string& file, const Libraries& libraries) {
  const Libraries::value_type* found = nullptr;
  for (const auto& library : libraries) {
    if (!file.starts_with(library.first)) continue;
    if (found == nullptr || library.first.size() > found->first.size()) found = &library;
  }
  return found;
}

bool is_users(const PythonCall& call, const Libraries& libraries) {
  return !call.file.starts_with("<frozen ") && library_of(call.file, libraries) == nullptr;
}

std::string shown(const std::string& file, const Libraries& libraries) {
  const auto* const library = library_of(file, libraries);
  return library == nullptr ? file : file.substr(library->second);
}

std::string line_of(const std::string& path, int number) {
  std::ifstream file(path);
  std::string line;
  for (int i = 0; i < number; ++i) {
    if (!std::getline(file, line)) return "";
  }
  // The encoding is unknown.
  std::ranges::replace_if(line, [](unsigned char c) { return c >= 0x80; }, '?');
  constexpr auto space = " \t\r\f";
  const auto begin = line.find_first_not_of(space);
  return begin == std::string::npos ? "" : line.substr(begin, line.find_last_not_of(space) + 1 - begin);
}

std::string line_about(const PythonCall& call, const Libraries& libraries) {
  const auto source = call.source.empty() ? line_of(call.file, call.line) : call.source;
  return shown(call.file, libraries) + ":" + std::to_string(call.line) + " " + call.function +
         (source.empty() ? "" : ": " + source);
}

// "(5 calls in torch/nn/modules, fastddp)"
std::string folded(Calls begin, Calls end, const Libraries& libraries) {
  std::vector<std::string> folders;
  for (auto call = begin; call != end; ++call) {
    const std::filesystem::path path = shown(call->file, libraries);
    const auto folder = (path.has_parent_path() ? path.parent_path() : path).string();
    if (std::ranges::find(folders, folder) == folders.end()) folders.push_back(folder);
  }
  const auto count = std::distance(begin, end);
  return "(" + std::to_string(count) + (count == 1 ? " call in " : " calls in ") + listed(folders) + ")";
}

}  // namespace

std::vector<std::string> in_lines(const std::vector<PythonCall>& calls, const Libraries& libraries) {
  const auto users = [&](const PythonCall& call) { return is_users(call, libraries); };
  std::vector<std::string> lines;
  auto call = std::ranges::find_if(calls, users);  // calls that led to the user's first one say nothing
  if (call == calls.end()) {
    for (const auto& one : calls) lines.push_back(line_about(one, libraries));
  }
  while (call != calls.end()) {
    const auto next = std::find_if(call, calls.end(), users);
    if (next == call) {
      lines.push_back(line_about(*call++, libraries));
      continue;
    }
    if (next != calls.end()) {
      lines.push_back(folded(call, next, libraries));
    } else {
      lines.push_back(line_about(*call, libraries));
      if (next - call > 2) lines.push_back(folded(call + 1, next - 1, libraries));
      if (next - call > 1) lines.push_back(line_about(*(next - 1), libraries));
    }
    call = next;
  }
  if (lines.size() > kMostLines) lines.erase(lines.begin(), lines.end() - kMostLines);
  return lines;
}

}  // namespace fastddp
