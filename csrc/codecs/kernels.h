// SPDX-License-Identifier: Apache-2.0
// The inner loops of the codecs over one row of `n` values, one set per instruction
// set. All sets give the same bits; `tests/csrc` and the Python tests compare them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/instructions.h"

namespace clearbox {

struct Kernels {
  /// Exact conversions of bfloat16 and float16, given as 16 bits, to float32.
  void (*widen_bfloat16)(const std::uint16_t* in, std::size_t n, float* out);
  void (*widen_float16)(const std::uint16_t* in, std::size_t n, float* out);

  /// The largest magnitude; NaN if the row has one, 0 for an empty row.
  float (*largest)(const float* in, std::size_t n);

  /// `in / unit` in float64, rounded to nearest even and clamped to -127..127; NaN
  /// becomes 0.
  void (*quantize)(const float* in, std::size_t n, float unit, std::int8_t* out);

  /// Magnitudes as integers with the same order; NaN counts as infinity.
  void (*magnitudes)(const float* in, std::size_t n, std::uint32_t* out);

  /// Writes the indices where `in` is at least `limit`, ascending, and returns their
  /// number; `out` has room for `n`.
  std::size_t (*at_least)(const std::uint32_t* in, std::size_t n, std::uint32_t limit,
                          std::uint32_t* out);
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

/// The kernels for these instructions, which this CPU must support.
const Kernels& kernels_for(Instructions instructions);

}  // namespace clearbox
