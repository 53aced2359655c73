// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace clearbox {

/// Releases the GIL for its lifetime.
///
/// Before 3.14, Python terminates a thread that requests the GIL during interpreter
/// shutdown by unwinding its stack. If that reaches a `noexcept` function, C++ aborts
/// the process. The unwinding is therefore caught here, and the thread waits until the
/// process exits.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (abi::__forced_unwind&) {
      while (true) ::pause();
    }
  }

 private:
  PyThreadState* const thread_;
};

}  // namespace clearbox
