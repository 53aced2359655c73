// SPDX-License-Identifier: Apache-2.0
#include "programs/run.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "programs/formats.h"
#include "programs/instruction.h"
#include "programs/sums.h"

namespace clearbox {
namespace {

constexpr float kSmallest = 0x1p-126F;  // The smallest norm used as a divisor.
constexpr float kDeviation = 1e-5F;     // Added to a standard deviation.
constexpr float kFiresAbove = 0.5F;

float number(const float* values, std::size_t place) {
  return values == nullptr ? 0.0F : values[place];
}

float clipped(float value, float low, float high) {
  return std::min(std::max(value, low), high);
}

float activated(const Instruction& one, float value, float threshold) {
  switch (one.activation) {
    case Activation::kRelu:
      return std::max(value, 0.0F);
    case Activation::kJumpRelu:
      return value > threshold ? value : 0.0F;
    case Activation::kStep:
      return value > threshold ? 1.0F : 0.0F;
    case Activation::kClip:
      return clipped(value, one.low, one.high);
    case Activation::kSelect:
    case Activation::kIdentity:
      break;
  }
  return value;
}

/// A row of the stream in float32, from the first instruction of its program to the
/// last.
class Row {
 public:
  Row(const StepRows& step, std::size_t token, float* memory)
      : step_(step),
        token_(token),
        width_(step.width),
        gates_(step.gates + token * step.gates_apart),
        x_(memory),
        before_(memory + width_),
        total_(memory + 2 * width_) {}

  float* values() { return x_; }
  bool changed() const { return changed_; }

  void execute(const Instruction& one) {
    if (one.has(flag::kSaveNorm)) norm_ = norm(x_, width_);
    const bool doses = one.has(flag::kDose);
    if (one.kind == Kind::kProbe) {
      const float decided = probe(one);
      if (doses) dose_of(one) = decided;
      return;
    }
    if (one.kind == Kind::kMeasure) {
      if (doses) measure(one);
      return;
    }
    if (doses) std::copy_n(x_, width_, before_);
    act(one);
    if (doses && one.has(flag::kValue)) {
      dose_of(one) = active_;
    } else if (doses) {
      const float base = std::max(norm(before_, width_), kSmallest);
      dose_of(one) = distance(x_, before_, width_) / base;
    }
  }

 private:
  void act(const Instruction& one) {
    switch (one.kind) {
      case Kind::kLinear:
        return linear(one);
      case Kind::kReplace:
        return replace(one);
      case Kind::kLowRank:
        return low_rank(one);
      case Kind::kRotate:
        return rotate(one);
      case Kind::kProbe:
      case Kind::kMeasure:
        break;
    }
  }

  std::size_t step_token() const { return token_ + step_.first; }

  const float* placed(const Instruction& one, const float* vectors) const {
    const auto* bytes = reinterpret_cast<const std::byte*>(vectors);
    const auto shift = static_cast<std::int64_t>(step_token()) * one.token_bytes;
    return reinterpret_cast<const float*>(bytes + shift);
  }

  /// The vector that an instruction with one direction writes.
  const float* written(const Instruction& one) const {
    return placed(one, one.has(flag::kOtherWrite) ? one.write : one.read);
  }

  float& dose_of(const Instruction& one) const {
    return one.doses[step_token() * static_cast<std::size_t>(one.doses_apart)];
  }

  float& column(std::int32_t at) const { return gates_[static_cast<std::size_t>(at)]; }

  /// Where the first token of this token's request that opens a gate is noted.
  float& opened(std::int32_t gate) const {
    const auto segment =
        static_cast<std::size_t>(std::bit_cast<std::int32_t>(gates_[kSegment]));
    float* row = step_.gates + (segment - step_.first) * step_.gates_apart;
    return row[kOpened + static_cast<std::size_t>(gate)];
  }

  float gate(const Instruction& one) const {
    if (one.gate < 0) return 1.0F;
    if (one.has(flag::kLatch)) {
      const auto at = std::bit_cast<std::int32_t>(opened(one.gate));
      if (at <= static_cast<std::int32_t>(step_token())) return 1.0F;
    }
    return column(one.gate);
  }

  /// The n of the formulas: the saved norm, or the activation of a stored value.
  float factor(const Instruction& one) const {
    if (!one.has(flag::kCarried)) return norm_;
    const float value = column(one.stored) + number(one.bias, 0);
    return value > number(one.threshold, 0) ? value : 0.0F;
  }

  static float scaled(const Instruction& one, float factor) {
    return one.c1 == 0.0F ? one.c0 : one.c0 + one.c1 * factor;
  }

  void linear(const Instruction& one) {
    const float* u = placed(one, one.read);
    const float* w = written(one);
    const float n = factor(one);
    float amount = scaled(one, n);
    if (one.has(flag::kDot)) {
      const float along = dot(x_, u, width_);
      if (one.c2 != 0.0F) amount += one.c2 * along;
      if (one.c3 != 0.0F)
        amount += one.c3 * (clipped(along, one.low, one.high) - along);
    }
    amount *= gate(one);
    if (one.has(flag::kOnlyActive) && n == 0.0F) amount = 0.0F;
    for (std::size_t i = 0; i < width_; ++i) x_[i] += amount * w[i];
    changed_ = changed_ || amount != 0.0F;
  }

  void replace(const Instruction& one) {
    const float* w = written(one);
    const float amount = scaled(one, factor(one));
    const float share = gate(one) * one.alpha;
    const auto* mask =
        one.has(flag::kMask) ? static_cast<const float*>(one.extra) : nullptr;
    for (std::size_t i = 0; i < width_; ++i) {
      const float part = mask == nullptr ? share : share * mask[i];
      const float value = amount * w[i];
      const float mixed = x_[i] * (1.0F - part) + part * value;
      x_[i] = part == 1.0F ? value : part == 0.0F ? x_[i] : mixed;
    }
    changed_ = changed_ || share != 0.0F;
  }

  /// The value if it is among the largest of all rivals, else 0.
  float selected(const Instruction& one, float value, float by) const {
    if (!(value > one.low)) return 0.0F;
    const bool absolute = one.low < 0.0F;
    const float size = absolute ? std::abs(value) : value;
    const auto* row = static_cast<const float*>(one.extra);
    const auto count = static_cast<std::size_t>(one.c3);
    auto left = static_cast<std::size_t>(one.c2);
    for (std::size_t rival = 0; rival < count; ++rival, row += width_) {
      const float other = dot(x_, row, width_) / by + one.threshold[rival];
      if ((absolute ? std::abs(other) : other) > size && --left == 0) return 0.0F;
    }
    return value;
  }

  void low_rank(const Instruction& one) {
    float size = 1.0F, by = 1.0F;
    if (one.has(flag::kCosine)) {
      size = norm(x_, width_);
      by = std::max(size, kSmallest);
    } else if (one.has(flag::kStandard)) {
      size = deviation(x_, width_);
      by = size + kDeviation;
    }
    const float share = gate(one) * size;
    std::fill_n(total_, width_, 0.0F);
    for (std::size_t r = 0; r < static_cast<std::size_t>(one.rank); ++r) {
      const float read = dot(x_, one.read + r * width_, width_) / by;
      const float value = read + number(one.bias, r);
      active_ = one.activation == Activation::kSelect
                    ? selected(one, value, by)
                    : activated(one, value, number(one.threshold, r));
      float amount = share * (one.c0 + number(one.own_c0, r) +
                              (one.c1 + number(one.own_c1, r)) * active_);
      if (one.has(flag::kOnlyActive) && active_ == 0.0F) amount = 0.0F;
      const float* w = one.write + r * width_;
      for (std::size_t i = 0; i < width_; ++i) total_[i] += amount * w[i];
      changed_ = changed_ || amount != 0.0F;
    }
    for (std::size_t i = 0; i < width_; ++i) x_[i] += total_[i];
  }

  void rotate(const Instruction& one) {
    const float a = dot(x_, one.read, width_), b = dot(x_, one.write, width_);
    const float length = std::sqrt(a * a + b * b), g = gate(one);
    const float along = g * (length * one.c0 - a), across = g * (length * one.c1 - b);
    for (std::size_t i = 0; i < width_; ++i) {
      x_[i] += along * one.read[i] + across * one.write[i];
    }
    changed_ = changed_ || along != 0.0F || across != 0.0F;
  }

  float probe(const Instruction& one) {
    float value = dot(x_, one.read, width_);
    if (one.has(flag::kCosine)) value /= std::max(norm(x_, width_), kSmallest);
    if (one.has(flag::kStandard)) value /= deviation(x_, width_) + kDeviation;
    value += one.c0;
    const float beyond = one.c3 * (value - one.c2);
    float decided = beyond > 0.0F ? 1.0F : 0.0F;
    if (one.c1 != 0.0F) decided = 1.0F / (1.0F + std::exp(-one.c1 * beyond));
    if (one.has(flag::kValue)) decided = value;
    float& kept = column(one.gate);
    if (one.has(flag::kKeep) && kept > decided) decided = kept;
    kept = decided;
    if (one.has(flag::kLatch) && decided > 0.0F) {
      float& noted = opened(one.gate);
      const auto at = static_cast<std::int32_t>(step_token());
      noted = std::bit_cast<float>(std::min(std::bit_cast<std::int32_t>(noted), at));
    }
    if (one.has(flag::kCount) && decided > kFiresAbove) {
      ++*static_cast<std::int64_t*>(one.extra);
    }
    return decided;
  }

  /// The dose of a vector that was added before: over the norm without it.
  void measure(const Instruction& one) const {
    const float base = std::max(distance(x_, one.read, width_), kSmallest);
    dose_of(one) = norm(one.read, width_) / base;
  }

  const StepRows& step_;
  const std::size_t token_;
  const std::size_t width_;
  float* const gates_;
  float* const x_;
  float* const before_;
  float* const total_;
  float norm_ = 0.0F;
  float active_ = 0.0F;
  bool changed_ = false;
};

template <typename Format>
class Tokens {
 public:
  explicit Tokens(const StepRows& step) : step_(step) {}

  void run() {
    for (std::size_t token = 0; token < step_.tokens; ++token) {
      const std::int64_t address = step_.index[step_.rows[token]];
      if (address != 0) run_one(token, reinterpret_cast<const std::byte*>(address));
    }
  }

 private:
  using Stored = typename Format::Stored;

  void run_one(std::size_t token, const std::byte* program) {
    if (memory_ == nullptr) {
      memory_ = std::make_unique_for_overwrite<float[]>(3 * step_.width);
    }
    Row row(step_, token, memory_.get());
    load(token, row.values());
    std::int32_t count;
    std::memcpy(&count, program, sizeof(count));
    for (std::int32_t left = count; left > 0; --left) {
      program += kInstructionBytes;
      Instruction one;
      std::memcpy(&one, program, sizeof(one));
      row.execute(one);
    }
    if (row.changed()) store(token, row.values());
  }

  void load(std::size_t token, float* x) const {
    const auto* branch =
        static_cast<const Stored*>(step_.source) + token * step_.source_apart;
    for (std::size_t i = 0; i < step_.width; ++i) x[i] = Format::read(branch[i]);
    if (step_.residual == nullptr) return;
    const Stored* other = residual(token);
    for (std::size_t i = 0; i < step_.width; ++i) x[i] += Format::read(other[i]);
  }

  void store(std::size_t token, const float* x) const {
    auto* branch = static_cast<Stored*>(step_.hidden) + token * step_.hidden_apart;
    if (step_.leads) {
      std::transform(x, x + step_.width, branch, Format::rounded);
    } else {
      std::fill_n(branch, step_.width, Stored{});
    }
    if (step_.residual != nullptr) std::fill_n(residual(token), step_.width, Stored{});
  }

  Stored* residual(std::size_t token) const {
    return static_cast<Stored*>(step_.residual) + token * step_.residual_apart;
  }

  const StepRows& step_;
  std::unique_ptr<float[]> memory_;
};

}  // namespace

void run_programs(const StepRows& step) {
  switch (step.dtype) {
    case Dtype::kFloat32:
      return Tokens<Float32>(step).run();
    case Dtype::kFloat16:
      return Tokens<Float16>(step).run();
    case Dtype::kBfloat16:
      return Tokens<Bfloat16>(step).run();
  }
}

}  // namespace clearbox
