// SPDX-License-Identifier: Apache-2.0
// Captured rows in memory, read one at a time as float32.
#pragma once

#include <cstddef>
#include <vector>

#include "codecs/kernels.h"
#include "dtype.h"

namespace clearbox {

/// `[num_rows, width]`, contiguous and row-major.
struct Rows {
  const std::byte* data;
  std::size_t num_rows;
  std::size_t width;
  Dtype dtype;
};

/// Reads rows as float32 into its own memory.
class RowReader {
 public:
  RowReader(const Rows& rows, const Kernels& kernels);

  /// `width` values, valid until the next call.
  const float* read(std::size_t row);

 private:
  const Rows rows_;
  const Kernels& kernels_;
  std::vector<float> wide_;
};

}  // namespace clearbox
