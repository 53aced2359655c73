# SPDX-License-Identifier: Apache-2.0
"""Rows, results and counters from workers to front ends."""
