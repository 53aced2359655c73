// SPDX-License-Identifier: Apache-2.0
#include "codecs/rows.h"

#include <cstdint>
#include <cstring>

namespace clearbox {

RowReader::RowReader(const Rows& rows, const Kernels& kernels)
    : rows_(rows), kernels_(kernels), wide_(rows.width) {}

const float* RowReader::read(std::size_t row) {
  const std::size_t row_bytes = rows_.width * size_of(rows_.dtype);
  const std::byte* at = rows_.data + row * row_bytes;
  switch (rows_.dtype) {
    case Dtype::kFloat32:
      // Copied, as a buffer from Python may not be aligned for float.
      std::memcpy(wide_.data(), at, row_bytes);
      break;
    case Dtype::kBfloat16:
      kernels_.widen_bfloat16(reinterpret_cast<const std::uint16_t*>(at), rows_.width,
                              wide_.data());
      break;
    case Dtype::kFloat16:
      kernels_.widen_float16(reinterpret_cast<const std::uint16_t*>(at), rows_.width,
                             wide_.data());
      break;
  }
  return wide_.data();
}

}  // namespace clearbox
