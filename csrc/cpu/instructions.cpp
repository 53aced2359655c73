// SPDX-License-Identifier: Apache-2.0
#include "cpu/instructions.h"

namespace clearbox {

#if defined(__x86_64__)

bool has(Instructions instructions) {
  switch (instructions) {
    case Instructions::kScalar:
      return true;
    case Instructions::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case Instructions::kAvx512:
      return has(Instructions::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  }
  return false;
}

#else

bool has(Instructions instructions) { return instructions == Instructions::kScalar; }

#endif

Instructions best_instructions() {
  static const Instructions best = has(Instructions::kAvx512) ? Instructions::kAvx512
                                   : has(Instructions::kAvx2) ? Instructions::kAvx2
                                                              : Instructions::kScalar;
  return best;
}

}  // namespace clearbox
