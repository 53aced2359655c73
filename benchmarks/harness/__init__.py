# SPDX-License-Identifier: Apache-2.0
"""Code shared by several benchmarks."""
