# SPDX-License-Identifier: Apache-2.0
"""Readouts in the worker: results computed on the device."""
