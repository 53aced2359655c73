// SPDX-License-Identifier: Apache-2.0
// Reads and writes of programs; tests/model_executor compares their arithmetic.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "programs/instruction.h"
#include "programs/run.h"

namespace {

using clearbox::Dtype;
using clearbox::Instruction;
using clearbox::Kind;
using clearbox::StepRows;

constexpr std::size_t kWidth = 19, kTokens = 4, kColumns = 68;
constexpr float kLarge = std::numeric_limits<float>::max();

Instruction instruction(Kind kind, std::int32_t flags, const float* vector) {
  Instruction one{};
  one.kind = kind;
  one.flags = flags;
  one.rank = 1;
  one.gate = one.stored = -1;
  one.read = one.write = vector;
  one.low = -kLarge;
  one.high = kLarge;
  one.alpha = 1;
  return one;
}

std::vector<std::byte> program(const std::vector<Instruction>& instructions) {
  std::vector<std::byte> made((1 + instructions.size()) * clearbox::kInstructionBytes);
  const auto count = static_cast<std::int32_t>(instructions.size());
  std::memcpy(made.data(), &count, sizeof(count));
  for (std::size_t number = 0; number < instructions.size(); ++number) {
    std::memcpy(made.data() + (1 + number) * clearbox::kInstructionBytes,
                &instructions[number], sizeof(Instruction));
  }
  return made;
}

/// A step of which every other token, from the second on, has a program.
struct Step {
  std::vector<float> hidden = std::vector<float>(kTokens * kWidth, 1.0F);
  std::vector<float> residual = std::vector<float>(kTokens * kWidth, 2.0F);
  std::vector<float> gates = std::vector<float>(kTokens * kColumns, 0.0F);
  std::vector<std::int32_t> rows = {0, 1, 0, 1};

  void run(const std::vector<std::byte>& words) {
    const std::vector<std::int64_t> index = {
        0, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(words.data()))};
    clearbox::run_programs({hidden.data(), kWidth, hidden.data(), kWidth,
                            residual.data(), kWidth, index.data(), rows.data(),
                            gates.data(), kColumns, kTokens, kWidth, 0, Dtype::kFloat32,
                            true});
  }

  bool holds(std::size_t token, float branch, float other) const {
    for (std::size_t i = token * kWidth; i < (token + 1) * kWidth; ++i) {
      if (std::abs(hidden[i] - branch) > 1e-5F || residual[i] != other) return false;
    }
    return true;
  }
};

void every_kind_stays_within_its_memory() {
  const std::vector<float> ones(kWidth, 1.0F), rows(2 * kWidth, 0.5F);
  const std::vector<float> by_token(kTokens * kWidth, 6.0F);
  std::vector<float> doses(kTokens * 2, -1.0F);
  std::int64_t count = 0;
  Instruction probe = instruction(
      Kind::kProbe, clearbox::flag::kCount | clearbox::flag::kDose, ones.data());
  probe.c3 = 1;
  probe.gate = 3;
  probe.extra = &count;
  Instruction low_rank = instruction(Kind::kLowRank, 0, rows.data());
  low_rank.rank = 2;
  low_rank.own_c1 = ones.data();
  Instruction rotate = instruction(Kind::kRotate, 0, ones.data());
  rotate.write = rows.data();
  Instruction measure = instruction(Kind::kMeasure, clearbox::flag::kDose, ones.data());
  std::vector<float> mask(kWidth, 1.0F);
  Instruction replace = instruction(Kind::kReplace, clearbox::flag::kMask, nullptr);
  replace.read = replace.write = by_token.data();
  replace.token_bytes = kWidth * sizeof(float);
  replace.extra = mask.data();
  replace.c0 = 1;
  replace.gate = 3;
  probe.doses = doses.data();
  measure.doses = doses.data() + 1;
  probe.doses_apart = measure.doses_apart = 2;
  Step step;
  step.run(program({probe, low_rank, rotate, measure, replace}));
  CHECK(count == 2 && step.gates[1 * kColumns + 3] == 1 && step.gates[3] == 0);
  CHECK(doses[2] == 1 && doses[3] > 0 && doses[0] == -1 && doses[1] == -1);
  CHECK(step.holds(3, 6, 0) && step.holds(2, 1, 2));
}

}  // namespace

int main() { every_kind_stays_within_its_memory(); }
