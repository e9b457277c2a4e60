// How an error's text ends: with the code under which fastddp/errors.py explains it.
#pragma once

#include <string>

namespace fastddp {

// see("FD010") is " [FD010: fastddp explain FD010]".
inline std::string see(const char (&code)[6]) {
  return std::string(" [") + code + ": fastddp explain " + code + "]";
}

}  // namespace fastddp
