// The calls of Python code, as a report shows them.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fastddp {

struct PythonCall {
  std::string file;
  int line;
  std::string function;
  std::string source;  // the text of that line; empty: it is read from the file
};

// Folders of code that is not the user's, each with a slash at its end; and how many characters to cut off the front of paths
// in that folder.
using Libraries = std::vector<std::pair<std::string, size_t>>;

// A line for each of `calls`, the innermost last. Library calls between two calls of the user's are folded into one line. After
// the user's last call, only the first and the last library call are shown. If no call is the user's, the last ones are shown.
std::vector<std::string> in_lines(const std::vector<PythonCall>& calls, const Libraries& libraries);

}  // namespace fastddp
