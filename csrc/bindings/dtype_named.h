// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

#include "dtype.h"

namespace clearbox {

/// The dtype with a name of `DTYPES` in Python; throws if there is none.
inline Dtype dtype_named(std::string_view name) {
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  if (name == "float32") return Dtype::kFloat32;
  throw nanobind::value_error(
      ("dtype must be bfloat16, float16 or float32, not '" + std::string(name) + "'")
          .c_str());
}

}  // namespace clearbox
