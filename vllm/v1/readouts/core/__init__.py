# SPDX-License-Identifier: Apache-2.0
"""Readouts in the engine core: valid results and stop conditions."""
