# SPDX-License-Identifier: Apache-2.0
"""Capture in a worker's process, on the engine's thread."""
