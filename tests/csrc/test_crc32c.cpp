// SPDX-License-Identifier: Apache-2.0
#include <random>
#include <string_view>
#include <vector>

#include "check.h"
#include "checksum/crc32c.h"

namespace {

using clearbox::crc32c;
using clearbox::crc32c_table;

void published_values_hold() {
  const std::string_view digits = "123456789";
  CHECK(crc32c(std::as_bytes(std::span(digits))) == 0xE3069283);
  CHECK(crc32c_table(std::as_bytes(std::span(digits))) == 0xE3069283);
  const std::vector<std::byte> zeros(32);
  CHECK(crc32c(zeros) == 0x8A9136AA);  // RFC 3720, B.4
}

void both_forms_agree_wherever_the_data_is_cut() {
  std::mt19937 random(7);
  std::vector<std::byte> data(257);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  const std::span<const std::byte> all(data);
  const auto whole = crc32c_table(all);
  for (std::size_t cut = 0; cut <= data.size(); ++cut) {
    const auto first = crc32c(all.first(cut));
    CHECK(first == crc32c_table(all.first(cut)));
    CHECK(crc32c(all.subspan(cut), first) == whole);
  }
}

}  // namespace

int main() {
  published_values_hold();
  both_forms_agree_wherever_the_data_is_cut();
}
