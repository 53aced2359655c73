// SPDX-License-Identifier: Apache-2.0
// Codec `topk8`: the `k` values of the largest magnitude of each row. A record is
// `[float32 scale][uint32 index * k][int8 * k]`, little-endian, indices ascending.
// Of equal magnitudes the earlier ones are kept; NaN counts as infinity.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/rows.h"

namespace clearbox {

constexpr std::size_t topk8_record_bytes(std::size_t k) { return 5 * k + 4; }

/// Writes one record per row to `out`; `1 <= k <= rows.width`.
void encode_topk8(const Rows& rows, std::size_t k, const Kernels& kernels,
                  std::byte* out);

/// The `k`th largest of `n` keys below 2^31; `1 <= k <= n`.
std::uint32_t kth_largest(const std::uint32_t* keys, std::size_t n, std::size_t k);

}  // namespace clearbox
