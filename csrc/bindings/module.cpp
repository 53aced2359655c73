// SPDX-License-Identifier: Apache-2.0
#include "bindings/module.h"

NB_MODULE(_native, module) {
  module.doc() = "The byte path of rows: copies, codecs, checksums, writer threads.";
  // Pools are alive at exit on purpose when a thread of theirs hangs.
  nanobind::set_leak_warnings(false);
  clearbox::bind_codecs(module);
  clearbox::bind_rows(module);
  clearbox::bind_writer(module);
}
