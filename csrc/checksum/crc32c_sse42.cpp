// SPDX-License-Identifier: Apache-2.0
// Compiled for SSE 4.2, so nothing here may be inlined elsewhere.
#include <nmmintrin.h>

#include <cstring>

#include "checksum/crc32c.h"

namespace clearbox {

std::uint32_t crc32c_sse42(std::span<const std::byte> data, std::uint32_t before) {
  std::uint64_t crc = ~before;
  const std::byte* at = data.data();
  std::size_t left = data.size();
  for (; left >= 8; at += 8, left -= 8) {
    std::uint64_t group = 0;
    std::memcpy(&group, at, 8);
    crc = _mm_crc32_u64(crc, group);
  }
  auto last = static_cast<std::uint32_t>(crc);
  for (; left > 0; ++at, --left) {
    last = _mm_crc32_u8(last, static_cast<unsigned char>(*at));
  }
  return ~last;
}

}  // namespace clearbox
