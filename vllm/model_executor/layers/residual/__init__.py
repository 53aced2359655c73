# SPDX-License-Identifier: Apache-2.0
"""The residual stream's hook points: taps, ops and passes over the graph."""
