// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace clearbox {

/// The dtypes of rows of the stream, numbered as by `DTYPES` in Python.
enum class Dtype { kBfloat16, kFloat16, kFloat32 };

}  // namespace clearbox
