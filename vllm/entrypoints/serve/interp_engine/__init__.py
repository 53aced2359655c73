# SPDX-License-Identifier: Apache-2.0
"""interp-engine's routes, mounted with `--interp-engine-api`."""
