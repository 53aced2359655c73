// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace clearbox {

void bind_rows(nanobind::module_& module);
void bind_programs(nanobind::module_& module);

}  // namespace clearbox
