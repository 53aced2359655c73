// SPDX-License-Identifier: Apache-2.0
#include "checksum/crc32c.h"

#include <array>
#include <cstring>

#include "cpu/instructions.h"

namespace clearbox {
namespace {

constexpr std::uint32_t kReflected = 0x82F63B78;  // 0x1EDC6F41, lowest bit first

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

/// `tables[n][b]`: what byte `b` contributes when `n` more bytes follow in its group.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) {
      rest = (rest >> 1) ^ ((rest & 1) != 0 ? kReflected : 0);
    }
    tables[0][byte] = rest;
  }
  for (std::size_t n = 1; n < tables.size(); ++n) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t shorter = tables[n - 1][byte];
      tables[n][byte] = (shorter >> 8) ^ tables[0][shorter & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

std::uint32_t crc32c_table(std::span<const std::byte> data, std::uint32_t before) {
  std::uint32_t crc = ~before;
  const std::byte* at = data.data();
  std::size_t left = data.size();
  for (; left >= 8; at += 8, left -= 8) {
    std::uint64_t group = 0;
    std::memcpy(&group, at, 8);
    group ^= crc;
    crc = 0;
    for (std::size_t n = 0; n < 8; ++n) {
      crc ^= kTables[7 - n][(group >> (8 * n)) & 0xFF];
    }
  }
  for (; left > 0; ++at, --left) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint32_t>(*at)) & 0xFF];
  }
  return ~crc;
}

std::uint32_t crc32c(std::span<const std::byte> data, std::uint32_t before) {
#if defined(__x86_64__)
  static const bool fast = has_crc32c();
  if (fast) {
    return crc32c_sse42(data, before);
  }
#endif
  return crc32c_table(data, before);
}

}  // namespace clearbox
