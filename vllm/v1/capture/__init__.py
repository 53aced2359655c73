# SPDX-License-Identifier: Apache-2.0
"""Capture: rows of the residual stream, from the model to pluggable consumers."""
