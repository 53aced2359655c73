# SPDX-License-Identifier: Apache-2.0
"""The client of an earlier fork's sweeps, under its name."""
