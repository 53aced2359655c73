// SPDX-License-Identifier: Apache-2.0
#include "codecs/kernels.h"

namespace clearbox {

const Kernels& kernels_for(Instructions instructions) {
#if defined(__x86_64__)
  switch (instructions) {
    case Instructions::kAvx512:
      return kAvx512Kernels;
    case Instructions::kAvx2:
      return kAvx2Kernels;
    case Instructions::kScalar:
      break;
  }
#else
  static_cast<void>(instructions);
#endif
  return kScalarKernels;
}

}  // namespace clearbox
