// SPDX-License-Identifier: Apache-2.0
#include "codecs/kernels.h"
#include "codecs/scalar.h"

namespace clearbox {
namespace {

void widen_bfloat16(const std::uint16_t* in, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = scalar::from_bfloat16(in[i]);
}

void widen_float16(const std::uint16_t* in, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = scalar::from_float16(in[i]);
}

float largest(const float* in, std::size_t n) {
  float found = 0;
  for (std::size_t i = 0; i < n; ++i) found = scalar::larger(found, in[i]);
  return found;
}

void quantize(const float* in, std::size_t n, float unit, std::int8_t* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = scalar::quantize(in[i], unit);
}

void magnitudes(const float* in, std::size_t n, std::uint32_t* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = scalar::magnitude(in[i]);
}

std::size_t at_least(const std::uint32_t* in, std::size_t n, std::uint32_t limit,
                     std::uint32_t* out) {
  std::size_t found = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (in[i] >= limit) out[found++] = static_cast<std::uint32_t>(i);
  }
  return found;
}

}  // namespace

const Kernels kScalarKernels{widen_bfloat16, widen_float16, largest,
                             quantize,       magnitudes,    at_least};

}  // namespace clearbox
