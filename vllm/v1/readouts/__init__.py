# SPDX-License-Identifier: Apache-2.0
"""Readouts: probes, lenses, SAE features, norms and reductions of rows.

A tap stages the row as for a capture. The result is computed on the device, and only
the result leaves it, together with the output of the step.
"""
