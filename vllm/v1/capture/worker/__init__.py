# SPDX-License-Identifier: Apache-2.0
"""Capture in a worker process, on the engine's thread."""
