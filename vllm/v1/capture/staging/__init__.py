# SPDX-License-Identifier: Apache-2.0
"""Staging memory, and the layout of each step's rows in it."""
