# SPDX-License-Identifier: Apache-2.0
"""Shared by consumers that write files: buffers, writer threads, atomic files."""
