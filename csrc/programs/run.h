// SPDX-License-Identifier: Apache-2.0
// Executes the programs of a hook point on a CPU, one row of the stream per token.
#pragma once

#include <cstddef>
#include <cstdint>

namespace clearbox {

/// The dtypes of rows of the stream, numbered as by `DTYPES` in Python.
enum class Dtype { kBfloat16, kFloat16, kFloat32 };

/// The rows of a step at a hook point. Strides are in values.
struct StepRows {
  const void* source;  ///< `[tokens, width]`: the branch, whole; may be `hidden`
  std::size_t source_apart;
  void* hidden;  ///< `[tokens, width]`: this rank's part of the branch
  std::size_t hidden_apart;
  void* residual;  ///< `[tokens, width]`, or null
  std::size_t residual_apart;
  const std::int64_t* index;  ///< address of the program of each row, or 0
  const std::int32_t* rows;   ///< `[tokens]`: a row of the index
  float* gates;               ///< `[tokens, columns]`
  std::size_t gates_apart;
  std::size_t tokens;
  std::size_t width;
  std::size_t first;  ///< index of the first token in the step
  Dtype dtype;
  bool leads;  ///< whether this rank writes the changed rows; others write zeros
};

/// Executes each token's program, in place. A changed row is written to `hidden`, and
/// the residual becomes zeros there; other rows keep every bit.
void run_programs(const StepRows& step);

}  // namespace clearbox
