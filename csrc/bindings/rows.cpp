// SPDX-License-Identifier: Apache-2.0
// Copies of rows for Python. It passes addresses and keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings/module.h"
#include "bindings/unlocked.h"
#include "rows/gather.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clearbox {
namespace {

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

}  // namespace

void bind_rows(nb::module_& module) {
  module.def("gather_rows", &gather, "copies"_a, "row_bytes"_a, "threads"_a,
             "Copies rows from and to addresses; see csrc/rows/gather.h.");
}

}  // namespace clearbox
