// SPDX-License-Identifier: Apache-2.0
#include "codecs/full8.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace clearbox {

float quantize_row(const float* values, std::size_t width, const Kernels& kernels,
                   std::int8_t* out) {
  const float largest = kernels.largest(values, width);
  const float scale = largest / 127.0F;
  // The scale of a row of zeros is 0, and so is one that underflows.
  const float unit = std::isfinite(scale) && scale > 0 ? scale : 1.0F;
  kernels.quantize(values, width, unit, out);
  return std::isfinite(largest) ? scale : std::numeric_limits<float>::quiet_NaN();
}

void encode_full8(const Rows& rows, const Kernels& kernels, std::byte* out) {
  RowReader reader(rows, kernels);
  for (std::size_t row = 0; row < rows.num_rows; ++row) {
    const float scale = quantize_row(reader.read(row), rows.width, kernels,
                                     reinterpret_cast<std::int8_t*>(out + 4));
    std::memcpy(out, &scale, 4);
    out += full8_record_bytes(rows.width);
  }
}

}  // namespace clearbox
