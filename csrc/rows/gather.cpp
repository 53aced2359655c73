// SPDX-License-Identifier: Apache-2.0
#include "rows/gather.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace clearbox {
namespace {

/// Copies rows `[first, first + count)` of one tap.
void copy_tap(const RowCopy& copy, std::size_t tap, std::size_t first,
              std::size_t count, std::size_t row_bytes) {
  std::byte* target = copy.target + tap * copy.target_apart + first * row_bytes;
  const std::byte* source =
      copy.source + tap * copy.source_apart + first * copy.source_distance;
  if (copy.source_distance == row_bytes) {
    std::memcpy(target, source, count * row_bytes);
    return;
  }
  for (std::size_t row = 0; row < count; ++row) {
    std::memcpy(target, source, row_bytes);
    target += row_bytes;
    source += copy.source_distance;
  }
}

/// Copies rows `[begin, end)`, counted over all copies and taps in order.
void copy_part(std::span<const RowCopy> copies, std::size_t row_bytes,
               std::size_t begin, std::size_t end) {
  std::size_t at = 0;
  for (const RowCopy& copy : copies) {
    const std::size_t all = copy.taps * copy.rows;
    if (at + all > begin) {
      for (std::size_t tap = 0; tap < copy.taps; ++tap) {
        const std::size_t tap_at = at + tap * copy.rows;
        const std::size_t from = std::max(begin, tap_at);
        const std::size_t to = std::min(end, tap_at + copy.rows);
        if (from < to) copy_tap(copy, tap, from - tap_at, to - from, row_bytes);
      }
    }
    at += all;
    if (at >= end) return;
  }
}

}  // namespace

void gather_rows(std::span<const RowCopy> copies, std::size_t row_bytes,
                 unsigned threads) {
  std::size_t total = 0;
  for (const RowCopy& copy : copies) total += copy.taps * copy.rows;
  const std::size_t parts =
      std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(total, 1));
  const auto bound = [&](std::size_t part) { return total * part / parts; };
  std::vector<std::jthread> others;
  std::size_t alone_from = parts;
  for (std::size_t part = 1; part < parts; ++part) {
    try {
      others.emplace_back(
          [=] { copy_part(copies, row_bytes, bound(part), bound(part + 1)); });
    } catch (const std::system_error&) {  // No more threads: do the rest on this one.
      alone_from = part;
      break;
    }
  }
  copy_part(copies, row_bytes, 0, bound(1));
  if (alone_from < parts) copy_part(copies, row_bytes, bound(alone_from), total);
}

}  // namespace clearbox
