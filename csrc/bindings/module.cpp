// SPDX-License-Identifier: Apache-2.0
#include "bindings/module.h"

NB_MODULE(_native, module) {
  module.doc() = "Copies of rows, and programs of hook points.";
  clearbox::bind_rows(module);
  clearbox::bind_programs(module);
}
