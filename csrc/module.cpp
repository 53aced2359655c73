// SPDX-License-Identifier: Apache-2.0
// Copies of rows, and programs of hook points, for Python. It passes addresses and
// keeps the memory alive. Without it a CPU cannot run operations (PyTorch took 1.69 of
// an idle step where this takes 1.04), and rows are copied by PyTorch, which takes up
// to 2.4 times as long: benchmarks/NOTES.md, "Settled".
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "programs/run.h"
#include "rows/gather.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clearbox {
namespace {

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

/// The fields of `RowCopy`, in order.
using Numbers = std::array<std::size_t, 7>;

void gather(const std::vector<Numbers>& copies, std::size_t row_bytes,
            unsigned threads) {
  std::vector<RowCopy> checked;
  checked.reserve(copies.size());
  for (const auto& [target, target_apart, source, source_apart, source_distance, taps,
                    rows] : copies) {
    if (target_apart < rows * row_bytes && taps > 1) {
      throw nb::value_error("the rows of one tap would overlap those of the next");
    }
    checked.push_back({reinterpret_cast<std::byte*>(target), target_apart,
                       reinterpret_cast<const std::byte*>(source), source_apart,
                       source_distance, taps, rows});
  }
  const Unlocked unlocked;
  gather_rows(checked, row_bytes, threads);
}

/// Up to this many tokens take less time than another thread may keep the GIL.
constexpr std::size_t kFewTokens = 256;

/// The address and the stride of a tensor.
using Rows = std::array<std::size_t, 2>;

void run(const Rows& source, const Rows& hidden, const Rows& residual,
         const Rows& gates, std::size_t index, std::size_t rows, std::size_t tokens,
         std::size_t width, std::size_t first, int dtype, bool leads) {
  const StepRows step{reinterpret_cast<const void*>(source[0]),
                      source[1],
                      reinterpret_cast<void*>(hidden[0]),
                      hidden[1],
                      reinterpret_cast<void*>(residual[0]),
                      residual[1],
                      reinterpret_cast<const std::int64_t*>(index),
                      reinterpret_cast<const std::int32_t*>(rows),
                      reinterpret_cast<float*>(gates[0]),
                      gates[1],
                      tokens,
                      width,
                      first,
                      static_cast<Dtype>(dtype),
                      leads};
  if (tokens <= kFewTokens) return run_programs(step);
  const Unlocked unlocked;
  run_programs(step);
}

}  // namespace
}  // namespace clearbox

NB_MODULE(_native, module) {
  module.doc() = "Copies of rows, and programs of hook points.";
  module.def("gather_rows", &clearbox::gather, "copies"_a, "row_bytes"_a, "threads"_a,
             "Copies rows from and to addresses; see csrc/rows/gather.h.");
  module.def("run_programs", &clearbox::run, "source"_a, "hidden"_a, "residual"_a,
             "gates"_a, "index"_a, "rows"_a, "tokens"_a, "width"_a, "first"_a,
             "dtype"_a, "leads"_a,
             "Executes programs in place; see csrc/programs/run.h.");
}
