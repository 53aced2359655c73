// SPDX-License-Identifier: Apache-2.0
// What the tests need of a framework: a check that says where it failed, and to what.
#pragma once

#include <cstdlib>
#include <iostream>

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::cerr << __FILE__ << ':' << __LINE__ << ": " << #condition << '\n'; \
      std::exit(1);                                                           \
    }                                                                         \
  } while (false)
