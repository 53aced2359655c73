# SPDX-License-Identifier: Apache-2.0
"""Transport of rows, results and counters from workers to front ends."""
