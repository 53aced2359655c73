// SPDX-License-Identifier: Apache-2.0
// Codec `full8`: eight bits per value and one scale per row. A record is
// `[float32 scale][int8 * width]`, little-endian, and a value is `scale * int8`.
// The scale of a row that is not finite is NaN.
#pragma once

#include <cstddef>

#include "codecs/rows.h"

namespace clearbox {

constexpr std::size_t full8_record_bytes(std::size_t width) { return width + 4; }

/// Writes one record per row to `out`.
void encode_full8(const Rows& rows, const Kernels& kernels, std::byte* out);

/// Encodes one row: writes the integers to `out` and returns the scale.
float quantize_row(const float* values, std::size_t width, const Kernels& kernels,
                   std::int8_t* out);

}  // namespace clearbox
