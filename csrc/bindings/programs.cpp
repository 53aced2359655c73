// SPDX-License-Identifier: Apache-2.0
// Programs of hook points for Python. It passes addresses and keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "bindings/module.h"
#include "bindings/unlocked.h"
#include "programs/run.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clearbox {
namespace {

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

void bind_programs(nb::module_& module) {
  module.def("run_programs", &run, "source"_a, "hidden"_a, "residual"_a, "gates"_a,
             "index"_a, "rows"_a, "tokens"_a, "width"_a, "first"_a, "dtype"_a,
             "leads"_a, "Executes programs in place; see csrc/programs/run.h.");
}

}  // namespace clearbox
