// SPDX-License-Identifier: Apache-2.0
// The dtypes of the stream: how values are read as float32, and rounded to the nearest
// again, ties to even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace clearbox {

struct Float32 {
  using Stored = float;
  static float read(float value) { return value; }
  static float rounded(float value) { return value; }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  static float read(Stored bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static Stored rounded(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;  // NaN
    return static_cast<Stored>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  static float read(Stored bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1F;
    const std::uint32_t fraction = bits & 0x3FF;
    if (exponent == 0) {  // subnormal or zero: a multiple of 2^-24
      const float value = static_cast<float>(fraction) * 0x1p-24F;
      return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
    }
    if (exponent == 0x1F) {  // infinity, or NaN made quiet
      const std::uint32_t quiet = fraction != 0 ? 0x400000 : 0;
      return std::bit_cast<float>(sign | 0x7F800000 | quiet | (fraction << 13));
    }
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  }
  static Stored rounded(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint32_t>((bits >> 16) & 0x8000);
    const std::uint32_t size = bits & 0x7FFFFFFF;
    std::uint32_t found;
    if (size > 0x7F800000) {
      found = 0x7E00;  // NaN
    } else if (size >= 0x477FF000) {
      found = 0x7C00;  // from 65520 on, halfway past the largest number: infinity
    } else if (size >= 0x38800000) {
      found = (size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13;
    } else {  // below 2^-14: a multiple of 2^-24
      found = static_cast<std::uint32_t>(
          std::nearbyint(std::bit_cast<float>(size) * 0x1p24F));
    }
    return static_cast<Stored>(sign | found);
  }
};

}  // namespace clearbox
