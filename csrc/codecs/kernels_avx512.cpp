// SPDX-License-Identifier: Apache-2.0
// Compiled for AVX-512 F, BW and VL; called only through kAvx512Kernels. The end of a
// row is handled by a masked step instead of a scalar loop.
#include <immintrin.h>

#include "codecs/kernels.h"

namespace clearbox {
namespace {

constexpr std::size_t kLanes = 16;

/// Mask of the lanes of the step at `i` that are within the row.
__mmask16 lanes_at(std::size_t i, std::size_t n) {
  const std::size_t left = n - i;
  if (left >= kLanes) return 0xFFFF;
  return static_cast<__mmask16>((1U << left) - 1);
}

__m512 sizes_of(__m512 values) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7FFFFFFF)));
}

void widen_bfloat16(const std::uint16_t* in, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_at(i, n);
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, in + i));
    _mm512_mask_storeu_ps(out + i, lanes,
                          _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
  }
}

void widen_float16(const std::uint16_t* in, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_at(i, n);
    const __m256i half = _mm256_maskz_loadu_epi16(lanes, in + i);
    _mm512_mask_storeu_ps(out + i, lanes, _mm512_cvtph_ps(half));
  }
}

float largest(const float* in, std::size_t n) {
  __m512 found = _mm512_setzero_ps();
  unsigned odd = 0;
  for (std::size_t i = 0; i < n; i += kLanes) {
    const __m512 values = _mm512_maskz_loadu_ps(lanes_at(i, n), in + i);
    odd |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    found = _mm512_max_ps(sizes_of(values), found);
  }
  return odd != 0 ? __builtin_nanf("") : _mm512_reduce_max_ps(found);
}

__m256i quantize_eight(__m256 values, __m512d unit) {
  const __m512d exact = _mm512_div_pd(_mm512_cvtps_pd(values), unit);
  const __mmask8 number = _mm512_cmp_pd_mask(exact, exact, _CMP_ORD_Q);
  const __m512d most = _mm512_maskz_min_pd(number, exact, _mm512_set1_pd(127));
  return _mm512_cvtpd_epi32(_mm512_max_pd(most, _mm512_set1_pd(-127)));
}

void quantize(const float* in, std::size_t n, float unit, std::int8_t* out) {
  const __m512d units = _mm512_set1_pd(static_cast<double>(unit));
  for (std::size_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_at(i, n);
    const __m512 values = _mm512_maskz_loadu_ps(lanes, in + i);
    const __m256 low = _mm512_castps512_ps256(values);
    const __m256 high =
        _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(values), 1));
    const __m512i words =
        _mm512_inserti64x4(_mm512_castsi256_si512(quantize_eight(low, units)),
                           quantize_eight(high, units), 1);
    _mm_mask_storeu_epi8(out + i, lanes, _mm512_cvtepi32_epi8(words));
  }
}

void magnitudes(const float* in, std::size_t n, std::uint32_t* out) {
  const __m512i infinity = _mm512_set1_epi32(0x7F800000);
  for (std::size_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_at(i, n);
    const __m512 sizes = sizes_of(_mm512_maskz_loadu_ps(lanes, in + i));
    _mm512_mask_storeu_epi32(out + i, lanes,
                             _mm512_min_epu32(_mm512_castps_si512(sizes), infinity));
  }
}

std::size_t at_least(const std::uint32_t* in, std::size_t n, std::uint32_t limit,
                     std::uint32_t* out) {
  const __m512i limits = _mm512_set1_epi32(static_cast<int>(limit));
  const __m512i count =
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  std::size_t found = 0;
  for (std::size_t i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = lanes_at(i, n);
    const __m512i keys = _mm512_maskz_loadu_epi32(lanes, in + i);
    const __mmask16 fits = _mm512_mask_cmpge_epu32_mask(lanes, keys, limits);
    const __m512i places =
        _mm512_add_epi32(count, _mm512_set1_epi32(static_cast<int>(i)));
    // Compress in a register: compressing stores are slow on some CPUs.
    const auto num_fits = static_cast<unsigned>(__builtin_popcount(fits));
    _mm512_mask_storeu_epi32(out + found, lanes_at(0, num_fits),
                             _mm512_maskz_compress_epi32(fits, places));
    found += num_fits;
  }
  return found;
}

}  // namespace

const Kernels kAvx512Kernels{widen_bfloat16, widen_float16, largest,
                             quantize,       magnitudes,    at_least};

}  // namespace clearbox
