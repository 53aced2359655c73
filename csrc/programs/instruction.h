// SPDX-License-Identifier: Apache-2.0
// The form of programs in memory, as `words_of` in program.py writes it. The formulas
// are in the docstring of that module.
#pragma once

#include <cstddef>
#include <cstdint>

namespace clearbox {

enum class Kind : std::int32_t {
  kLinear,
  kReplace,
  kLowRank,
  kRotate,
  kProbe,
  kMeasure
};

enum class Activation : std::int32_t {
  kIdentity,
  kRelu,
  kJumpRelu,
  kStep,
  kClip,
  kSelect
};

namespace flag {
constexpr std::int32_t kDot = 1;
constexpr std::int32_t kSaveNorm = 2;
constexpr std::int32_t kOtherWrite = 4;
constexpr std::int32_t kMask = 8;
constexpr std::int32_t kOnlyActive = 16;
constexpr std::int32_t kCosine = 32;
constexpr std::int32_t kStandard = 64;
constexpr std::int32_t kKeep = 128;
constexpr std::int32_t kDose = 256;
constexpr std::int32_t kCount = 512;
constexpr std::int32_t kValue = 1024;
constexpr std::int32_t kLatch = 2048;
constexpr std::int32_t kCarried = 4096;
}  // namespace flag

/// Columns of a token's gates that hold an int32: see `OPENED` and `SEGMENT` in
/// program.py.
constexpr std::size_t kOpened = 16;
constexpr std::size_t kSegment = 32;

/// An instruction; absent arrays are null.
struct Instruction {
  Kind kind;
  std::int32_t flags;
  std::int32_t rank;
  Activation activation;
  std::int32_t gate;         ///< column of the gate, or -1
  std::int32_t doses_apart;  ///< values between the doses of consecutive tokens
  std::int64_t token_bytes;  ///< bytes between the vectors of consecutive tokens, or 0
  const float* read;         ///< `[rank, width]`
  const float* write;        ///< the same shape; with one direction `read` counts
                             ///< without `kOtherWrite`
  void* extra;               ///< the mask `[width]`, a probe's count (int64), or rivals
                             ///< `[c3, width]`, whose biases are then `threshold`
  const float* bias;
  const float* threshold;
  float c0;
  float c1;
  float c2;
  float c3;
  float low;
  float high;
  float alpha;
  std::int32_t stored;  ///< column of a stored value, or -1
  const float* own_c0;
  const float* own_c1;
  float* doses;

  bool has(std::int32_t wanted) const { return (flags & wanted) != 0; }
};

/// Size of an instruction, and of the head of a program, whose first int32 is the
/// number of instructions that follow.
constexpr std::size_t kInstructionBytes = 128;
static_assert(sizeof(Instruction) == kInstructionBytes, "differs from program.py");

}  // namespace clearbox
