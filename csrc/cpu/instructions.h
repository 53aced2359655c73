// SPDX-License-Identifier: Apache-2.0
// Detects this CPU's vector instructions at run time, as a wheel is built on one
// machine and runs on others.
#pragma once

namespace clearbox {

enum class Instructions { kScalar, kAvx2, kAvx512 };

/// Whether this CPU and its operating system support the instructions.
bool has(Instructions instructions);

/// The widest instructions that this CPU supports; detected once.
Instructions best_instructions();

}  // namespace clearbox
