# SPDX-License-Identifier: Apache-2.0
"""Readouts: probes, lenses, features, norms and reductions instead of rows.

A row is staged by its tap as for a capture, answered from on the device, and only the
answer leaves it, with the output of the step.
"""
