// SPDX-License-Identifier: Apache-2.0
// Rows that lie at equal distances, put one behind the other.
#pragma once

#include <cstddef>
#include <span>

namespace clearbox {

/// `taps` times `rows` rows. All distances are in bytes, from start to start.
struct RowCopy {
  std::byte* target;
  std::size_t target_apart;  ///< from tap to tap; the rows of a tap lie side by side
  const std::byte* source;
  std::size_t source_apart;     ///< from tap to tap
  std::size_t source_distance;  ///< from row to row
  std::size_t taps;
  std::size_t rows;
};

/// Does all copies, whose rows have `row_bytes` bytes and whose targets do not overlap,
/// on `threads` threads, the caller's among them.
void gather_rows(std::span<const RowCopy> copies, std::size_t row_bytes,
                 unsigned threads);

}  // namespace clearbox
