// SPDX-License-Identifier: Apache-2.0
// Codecs for Python: check the arguments, release the GIL and encode.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/dtype_named.h"
#include "bindings/module.h"
#include "codecs/full8.h"
#include "codecs/topk8.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clearbox {
namespace {

constexpr std::pair<std::string_view, Instructions> kInstructionNames[] = {
    {"scalar", Instructions::kScalar},
    {"avx2", Instructions::kAvx2},
    {"avx512", Instructions::kAvx512},
};

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto& [name, instructions] : kInstructionNames) {
    if (has(instructions)) names.emplace_back(name);
  }
  return names;
}

const Kernels& kernels_named(const std::optional<std::string>& wanted) {
  if (!wanted) return kernels_for(best_instructions());
  for (const auto& [name, instructions] : kInstructionNames) {
    if (name == *wanted && has(instructions)) return kernels_for(instructions);
  }
  throw nb::value_error(
      ("instructions: this CPU does not have '" + *wanted + "'; see instruction_sets()")
          .c_str());
}

/// Throws unless the buffer has `num_rows * row_bytes` bytes.
void expect_size(const Buffer& buffer, std::size_t num_rows, std::size_t row_bytes) {
  const bool overflows =
      row_bytes != 0 && num_rows > std::numeric_limits<std::size_t>::max() / row_bytes;
  if (overflows || buffer.size() != num_rows * row_bytes) {
    throw nb::value_error(("expected " + std::to_string(num_rows) + " rows of " +
                           std::to_string(row_bytes) + " bytes, got " +
                           std::to_string(buffer.size()) + " bytes")
                              .c_str());
  }
}

constexpr std::size_t kMaxWidth = std::size_t{1} << 31;

Rows rows_in(const Buffer& buffer, const std::string& dtype_name, std::size_t num_rows,
             std::size_t width) {
  if (width == 0 || width > kMaxWidth) {
    throw nb::value_error("width must be from 1 to 2**31");
  }
  const Dtype dtype = dtype_named(dtype_name);
  expect_size(buffer, num_rows, width * size_of(dtype));
  const auto address = reinterpret_cast<std::uintptr_t>(buffer.bytes().data());
  if (address % 2 != 0) throw nb::value_error("rows must lie at an even address");
  return {buffer.bytes().data(), num_rows, width, dtype};
}

nb::bytes full8_from(nb::handle rows, const std::string& dtype, std::size_t num_rows,
                     std::size_t width,
                     const std::optional<std::string>& instructions) {
  const Kernels& kernels = kernels_named(instructions);
  const Buffer buffer(rows);
  const Rows checked = rows_in(buffer, dtype, num_rows, width);
  return filled_bytes(num_rows * full8_record_bytes(width),
                      [&](std::byte* out) { encode_full8(checked, kernels, out); });
}

nb::bytes topk8_from(nb::handle rows, const std::string& dtype, std::size_t num_rows,
                     std::size_t width, std::size_t k,
                     const std::optional<std::string>& instructions) {
  const Kernels& kernels = kernels_named(instructions);
  const Buffer buffer(rows);
  const Rows checked = rows_in(buffer, dtype, num_rows, width);
  if (k < 1 || k > width) throw nb::value_error("k must be from 1 to the width");
  return filled_bytes(num_rows * topk8_record_bytes(k),
                      [&](std::byte* out) { encode_topk8(checked, k, kernels, out); });
}

}  // namespace

void bind_codecs(nb::module_& module) {
  module.def("instruction_sets", &instruction_sets,
             "The supported instruction sets of this CPU, the widest last.");
  module.def("encode_full8", &full8_from, "rows"_a, "dtype"_a, "num_rows"_a, "width"_a,
             "instructions"_a = nb::none(), "full8 records of rows.");
  module.def("encode_topk8", &topk8_from, "rows"_a, "dtype"_a, "num_rows"_a, "width"_a,
             "k"_a, "instructions"_a = nb::none(), "topk8 records of rows.");
}

}  // namespace clearbox
