// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "rows/gather.h"

namespace {

using clearbox::gather_rows;
using clearbox::RowCopy;

constexpr std::size_t kRowBytes = 3;

/// Copies of random shapes, out of one memory and side by side into another; with what
/// that one must hold.
struct Case {
  std::vector<std::byte> source;
  std::vector<std::byte> target;
  std::vector<std::byte> expected;
  std::vector<RowCopy> copies;
};

void add_copy(Case& one, std::mt19937& random, std::size_t& at) {
  const auto below = [&](std::size_t end) { return random() % end; };
  const std::size_t taps = 1 + below(3), rows = 1 + below(5), room = rows + below(3);
  const std::size_t distance = below(2) == 0 ? 1 : 2 + below(3), apart = below(9);
  const std::size_t first = below(100);
  one.copies.push_back({one.target.data() + at, room * kRowBytes,
                        one.source.data() + first * kRowBytes, apart * kRowBytes,
                        distance * kRowBytes, taps, rows});
  for (std::size_t tap = 0; tap < taps; ++tap) {
    for (std::size_t row = 0; row < rows; ++row) {
      const auto from =
          one.source.begin() + static_cast<std::ptrdiff_t>(
                                   (first + tap * apart + row * distance) * kRowBytes);
      std::copy_n(from, kRowBytes,
                  one.expected.begin() +
                      static_cast<std::ptrdiff_t>(at + (tap * room + row) * kRowBytes));
    }
  }
  at += taps * room * kRowBytes;
}

void every_row_lands_where_it_must() {
  std::mt19937 random(3);
  for (unsigned round = 0; round < 200; ++round) {
    Case one{std::vector<std::byte>(200 * kRowBytes),
             std::vector<std::byte>(2000),
             std::vector<std::byte>(2000),
             {}};
    for (auto& byte : one.source) byte = static_cast<std::byte>(random());
    std::size_t at = 0;
    for (std::size_t number = random() % 6; number > 0; --number) {
      add_copy(one, random, at);
    }
    gather_rows(one.copies, kRowBytes, 1 + round % 5);
    CHECK(one.target == one.expected);
  }
}

void more_threads_than_rows_do_no_harm() {
  std::vector<std::byte> source(1, std::byte{7}), target(1);
  const RowCopy copy{target.data(), 1, source.data(), 1, 1, 1, 1};
  gather_rows({&copy, 1}, 1, 9);
  CHECK(target == source);
  gather_rows({}, 1, 9);
}

}  // namespace

int main() {
  every_row_lands_where_it_must();
  more_threads_than_rows_do_no_harm();
}
