# SPDX-License-Identifier: Apache-2.0
"""Readouts where the rows and the weights are."""
