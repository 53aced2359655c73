// SPDX-License-Identifier: Apache-2.0
// Copies strided rows to contiguous memory.
#pragma once

#include <cstddef>
#include <span>

namespace clearbox {

/// A copy of `rows` rows of each of `taps` taps. All strides are in bytes.
struct RowCopy {
  std::byte* target;
  std::size_t target_apart;  ///< stride between taps; the rows of a tap are contiguous
  const std::byte* source;
  std::size_t source_apart;     ///< stride between taps
  std::size_t source_distance;  ///< stride between rows
  std::size_t taps;
  std::size_t rows;
};

/// Executes all copies on `threads` threads, including the caller's. Rows have
/// `row_bytes` bytes, and targets must not overlap.
void gather_rows(std::span<const RowCopy> copies, std::size_t row_bytes,
                 unsigned threads);

}  // namespace clearbox
