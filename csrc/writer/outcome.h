// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace clearbox {

/// How a job went: an `errno` and the path it is about, or 0.
struct Outcome {
  int error = 0;
  std::string path;

  bool good() const { return error == 0; }
};

}  // namespace clearbox
