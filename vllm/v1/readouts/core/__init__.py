# SPDX-License-Identifier: Apache-2.0
"""Readouts in the engine core: which results count, and which end a request."""
