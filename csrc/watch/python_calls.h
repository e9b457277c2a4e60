// Where Python code is, as a report shows it.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fastddp {

struct PythonCall {
  std::string file;
  int line;
  std::string function;
  std::string source;  // of that line; empty: it is read from the file
};

// Folders of code that is not the user's, each with a slash at its end, and how many letters of a path are left out there.
using Libraries = std::vector<std::pair<std::string, size_t>>;

// `calls`, the innermost one last, a line each. Those of libraries between two of the user's are folded, and of those that the
// user's last one has led to the first and the last are shown: what it has called, and what that is in. Where none is the
// user's, the last ones are shown.
std::vector<std::string> in_lines(const std::vector<PythonCall>& calls, const Libraries& libraries);

}  // namespace fastddp
