// SPDX-License-Identifier: Apache-2.0
// Sums over a row, in an order that depends on its length alone: a row's result is the
// same whatever other rows a step has, and on every CPU.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>

namespace clearbox {

/// Sums `term(i)` for `i < count` in 16 partial sums, which a compiler can vectorize
/// without reordering anything.
template <typename Term>
float sum(std::size_t count, Term term) {
  constexpr std::size_t kLanes = 16;
  std::array<float, kLanes> parts{};
  std::size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) parts[lane] += term(at + lane);
  }
  for (std::size_t lane = 0; at + lane < count; ++lane) parts[lane] += term(at + lane);
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) parts[lane] += parts[lane + half];
  }
  return parts[0];
}

inline float dot(const float* one, const float* other, std::size_t width) {
  return sum(width, [=](std::size_t i) { return one[i] * other[i]; });
}

inline float norm(const float* row, std::size_t width) {
  return std::sqrt(dot(row, row, width));
}

/// The norm of the difference of two rows.
inline float distance(const float* one, const float* other, std::size_t width) {
  return std::sqrt(sum(width, [=](std::size_t i) {
    const float off = one[i] - other[i];
    return off * off;
  }));
}

/// The standard deviation of a row's values, with the divisor `width - 1`.
inline float deviation(const float* row, std::size_t width) {
  const float mean =
      sum(width, [=](std::size_t i) { return row[i]; }) / static_cast<float>(width);
  const float squares = sum(width, [=](std::size_t i) {
    const float off = row[i] - mean;
    return off * off;
  });
  return std::sqrt(squares / static_cast<float>(width - 1));
}

}  // namespace clearbox
