// SPDX-License-Identifier: Apache-2.0
#include "codecs/topk8.h"

#include <array>
#include <cassert>
#include <cstring>

#include "codecs/full8.h"

namespace clearbox {
namespace {

/// Removes the last of the keys equal to `limit` until `k` places are left.
void drop_ties(std::vector<std::uint32_t>& places, const std::uint32_t* keys,
               std::uint32_t limit, std::size_t num_places, std::size_t k) {
  std::size_t surplus = num_places - k;
  std::size_t to = num_places;
  for (std::size_t from = num_places; from-- > 0;) {
    if (surplus > 0 && keys[places[from]] == limit) {
      --surplus;
    } else {
      places[--to] = places[from];
    }
  }
  std::memmove(places.data(), places.data() + to, k * sizeof(places[0]));
}

}  // namespace

std::uint32_t kth_largest(const std::uint32_t* keys, std::size_t n, std::size_t k) {
  assert(1 <= k && k <= n);
  // Radix selection from the top digit: each pass counts the keys that agree with the
  // digits found so far, and selects the digit that contains the k-th largest key.
  constexpr std::array<unsigned, 3> kShifts{20, 10, 0};
  std::uint32_t found = 0;
  std::uint32_t known = 0;  // mask of the bits of `found` that are determined
  for (const unsigned shift : kShifts) {
    const std::uint32_t digit_mask = shift == 20 ? 0x7FF : 0x3FF;
    std::array<std::uint32_t, 0x800> counts{};
    for (std::size_t i = 0; i < n; ++i) {
      if ((keys[i] & known) == found) ++counts[(keys[i] >> shift) & digit_mask];
    }
    std::uint32_t digit = digit_mask;
    while (counts[digit] < k) k -= counts[digit--];
    found |= digit << shift;
    known |= digit_mask << shift;
  }
  return found;
}

void encode_topk8(const Rows& rows, std::size_t k, const Kernels& kernels,
                  std::byte* out) {
  RowReader reader(rows, kernels);
  std::vector<std::uint32_t> keys(rows.width);
  std::vector<std::uint32_t> places(rows.width);
  std::vector<float> kept(k);
  for (std::size_t row = 0; row < rows.num_rows; ++row) {
    const float* values = reader.read(row);
    kernels.magnitudes(values, rows.width, keys.data());
    const std::uint32_t limit = kth_largest(keys.data(), rows.width, k);
    const std::size_t found =
        kernels.at_least(keys.data(), rows.width, limit, places.data());
    drop_ties(places, keys.data(), limit, found, k);
    for (std::size_t i = 0; i < k; ++i) kept[i] = values[places[i]];
    const float scale = quantize_row(kept.data(), k, kernels,
                                     reinterpret_cast<std::int8_t*>(out + 4 + 4 * k));
    std::memcpy(out, &scale, 4);
    std::memcpy(out + 4, places.data(), 4 * k);
    out += topk8_record_bytes(k);
  }
}

}  // namespace clearbox
