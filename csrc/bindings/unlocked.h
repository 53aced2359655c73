// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace clearbox {

/// Gives the GIL up for its lifetime.
///
/// Python before 3.14 ends a thread that asks for the GIL while the interpreter shuts
/// down by unwinding its stack, and C++ aborts the process when that meets a function
/// that must not throw. So the unwinding stops here, and so does the thread: the
/// process ends all the same.
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
