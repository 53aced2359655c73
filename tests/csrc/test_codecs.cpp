// SPDX-License-Identifier: Apache-2.0
// All instruction sets give the bytes of the scalar one, and touch no byte beyond the
// row: buffers are of the exact size, so the sanitizer notices.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "codecs/full8.h"
#include "codecs/topk8.h"

namespace {

using namespace clearbox;

constexpr Dtype kDtypes[] = {Dtype::kBfloat16, Dtype::kFloat16, Dtype::kFloat32};
constexpr Instructions kVector[] = {Instructions::kAvx2, Instructions::kAvx512};

/// Any bits, so any NaN, infinity and subnormal.
std::vector<std::byte> any_bits(std::size_t size, std::mt19937& random) {
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::byte> full8(const Rows& rows, Instructions instructions) {
  std::vector<std::byte> out(rows.num_rows * full8_record_bytes(rows.width));
  encode_full8(rows, kernels_for(instructions), out.data());
  return out;
}

std::vector<std::byte> topk8(const Rows& rows, std::size_t k, Instructions which) {
  std::vector<std::byte> out(rows.num_rows * topk8_record_bytes(k));
  encode_topk8(rows, k, kernels_for(which), out.data());
  return out;
}

void instruction_sets_agree() {
  std::mt19937 random(11);
  constexpr std::size_t kRows = 3;
  for (std::size_t width = 1; width < 70; ++width) {
    for (const Dtype dtype : kDtypes) {
      const auto data = any_bits(kRows * width * size_of(dtype), random);
      const Rows rows{data.data(), kRows, width, dtype};
      const std::size_t k = 1 + random() % width;
      const auto records = full8(rows, Instructions::kScalar);
      const auto kept = topk8(rows, k, Instructions::kScalar);
      for (const Instructions which : kVector) {
        if (!has(which)) continue;
        CHECK(full8(rows, which) == records);
        CHECK(topk8(rows, k, which) == kept);
      }
    }
  }
}

void the_kth_largest_is_that_of_a_sort() {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint32_t> keys(1 + random() % 50);
    const std::uint32_t range = round % 2 == 0 ? 5 : 0x7F800001;
    for (auto& key : keys) key = static_cast<std::uint32_t>(random()) % range;
    std::vector<std::uint32_t> sorted = keys;
    std::sort(sorted.rbegin(), sorted.rend());
    for (std::size_t k = 1; k <= keys.size(); ++k) {
      CHECK(kth_largest(keys.data(), keys.size(), k) == sorted[k - 1]);
    }
  }
}

}  // namespace

int main() {
  instruction_sets_agree();
  the_kth_largest_is_that_of_a_sort();
}
