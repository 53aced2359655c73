// SPDX-License-Identifier: Apache-2.0
// Operations on single values: for the scalar kernels and the ends of rows in AVX2
// ones. Everything is `static`: each file is compiled for other instructions and needs
// its own copy, or the linker might keep one that an older CPU cannot run.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace clearbox::scalar {

static inline float from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

static inline float from_float16(std::uint16_t bits) {
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

static inline float larger(float largest, float value) {
  const float size = __builtin_fabsf(value);
  // Written so that NaN propagates.
  return size <= largest || __builtin_isnan(largest) ? largest : size;
}

static inline std::int8_t quantize(float value, float unit) {
  const double exact = static_cast<double>(value) / static_cast<double>(unit);
  if (__builtin_isnan(exact)) {
    return 0;
  }
  const double within = exact > 127 ? 127 : exact < -127 ? -127 : exact;
  return static_cast<std::int8_t>(__builtin_lrint(within));
}

static inline std::uint32_t magnitude(float value) {
  const std::uint32_t size = std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFF;
  return size < 0x7F800000 ? size : 0x7F800000;
}

}  // namespace clearbox::scalar
