// SPDX-License-Identifier: Apache-2.0
// CRC32C, the Castagnoli checksum: RFC 3720, appendix B.4, gives test vectors.
// Polynomial 0x1EDC6F41, bits reflected in and out, start and final value all ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace clearbox {

/// The checksum of what `before` is the checksum of, followed by `data`.
std::uint32_t crc32c(std::span<const std::byte> data, std::uint32_t before = 0);

/// The same from tables, eight bytes a step; runs on every CPU.
std::uint32_t crc32c_table(std::span<const std::byte> data, std::uint32_t before = 0);

#if defined(__x86_64__)
/// The same with the instruction of SSE 4.2; call only if `has_crc32c()`.
std::uint32_t crc32c_sse42(std::span<const std::byte> data, std::uint32_t before = 0);
#endif

}  // namespace clearbox
