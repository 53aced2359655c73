// SPDX-License-Identifier: Apache-2.0
// Compiled for AVX2 and F16C; reached only through kAvx2Kernels.
#include <immintrin.h>

#include "codecs/kernels.h"
#include "codecs/scalar.h"

namespace clearbox {
namespace {

constexpr std::size_t kLanes = 8;

__m256 sizes_of(__m256 values) {
  return _mm256_and_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
}

__m128i load_half(const std::uint16_t* in) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
}

void widen_bfloat16(const std::uint16_t* in, std::size_t n, float* out) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256i wide = _mm256_cvtepu16_epi32(load_half(in + i));
    _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
  }
  for (; i < n; ++i) out[i] = scalar::from_bfloat16(in[i]);
}

void widen_float16(const std::uint16_t* in, std::size_t n, float* out) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(load_half(in + i)));
  }
  for (; i < n; ++i) out[i] = scalar::from_float16(in[i]);
}

float largest(const float* in, std::size_t n) {
  __m256 found = _mm256_setzero_ps();
  __m256 odd = _mm256_setzero_ps();  // all ones in lanes that had a NaN
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256 values = _mm256_loadu_ps(in + i);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    found = _mm256_max_ps(sizes_of(values), found);
  }
  if (_mm256_movemask_ps(odd) != 0) return __builtin_nanf("");
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, found);
  float most = 0;
  for (const float lane : lanes) most = scalar::larger(most, lane);
  for (; i < n; ++i) most = scalar::larger(most, in[i]);
  return most;
}

__m128i quantize_four(__m128 values, __m256d unit) {
  const __m256d exact = _mm256_div_pd(_mm256_cvtps_pd(values), unit);
  const __m256d number = _mm256_cmp_pd(exact, exact, _CMP_ORD_Q);
  const __m256d whole = _mm256_and_pd(exact, number);  // NaN becomes 0
  const __m256d most = _mm256_min_pd(whole, _mm256_set1_pd(127));
  return _mm256_cvtpd_epi32(_mm256_max_pd(most, _mm256_set1_pd(-127)));
}

void quantize(const float* in, std::size_t n, float unit, std::int8_t* out) {
  const __m256d units = _mm256_set1_pd(static_cast<double>(unit));
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m128i low = quantize_four(_mm_loadu_ps(in + i), units);
    const __m128i high = quantize_four(_mm_loadu_ps(in + i + 4), units);
    const __m128i words = _mm_packs_epi32(low, high);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i),
                     _mm_packs_epi16(words, words));
  }
  for (; i < n; ++i) out[i] = scalar::quantize(in[i], unit);
}

void magnitudes(const float* in, std::size_t n, std::uint32_t* out) {
  const __m256i infinity = _mm256_set1_epi32(0x7F800000);
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256i sizes = _mm256_castps_si256(sizes_of(_mm256_loadu_ps(in + i)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_min_epu32(sizes, infinity));
  }
  for (; i < n; ++i) out[i] = scalar::magnitude(in[i]);
}

std::size_t at_least(const std::uint32_t* in, std::size_t n, std::uint32_t limit,
                     std::uint32_t* out) {
  const __m256i limits = _mm256_set1_epi32(static_cast<int>(limit));
  std::size_t found = 0;
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256i keys = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const __m256i fits = _mm256_cmpeq_epi32(_mm256_max_epu32(keys, limits), keys);
    auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(fits)));
    for (; mask != 0; mask &= mask - 1) {
      out[found++] = static_cast<std::uint32_t>(i) +
                     static_cast<std::uint32_t>(__builtin_ctz(mask));
    }
  }
  for (; i < n; ++i) {
    if (in[i] >= limit) out[found++] = static_cast<std::uint32_t>(i);
  }
  return found;
}

}  // namespace

const Kernels kAvx2Kernels{widen_bfloat16, widen_float16, largest,
                           quantize,       magnitudes,    at_least};

}  // namespace clearbox
