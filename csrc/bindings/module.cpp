// SPDX-License-Identifier: Apache-2.0
#include "bindings/module.h"

NB_MODULE(_native, module) {
  module.doc() = "The encoders of rows, and copies of them.";
  clearbox::bind_codecs(module);
  clearbox::bind_rows(module);
}
