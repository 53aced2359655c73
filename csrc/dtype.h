// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace clearbox {

/// The dtypes of rows of the stream.
enum class Dtype { kBfloat16, kFloat16, kFloat32 };

constexpr std::size_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

}  // namespace clearbox
