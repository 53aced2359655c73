// SPDX-License-Identifier: Apache-2.0
// Which vector instructions this CPU has, asked once and at run time: a wheel is built
// on one machine and runs on others.
#pragma once

namespace clearbox {

enum class Instructions { kScalar, kAvx2, kAvx512 };

/// Whether this CPU, and its operating system, can run them.
bool has(Instructions instructions);

/// The widest that this CPU has.
Instructions best_instructions();

}  // namespace clearbox
