# SPDX-License-Identifier: Apache-2.0
"""Capture in the engine core process."""
