// SPDX-License-Identifier: Apache-2.0
#include "bindings/module.h"

NB_MODULE(_native, module) {
  module.doc() = "Encoders of rows, copies of rows, and programs of hook points.";
  clearbox::bind_codecs(module);
  clearbox::bind_rows(module);
  clearbox::bind_programs(module);
}
