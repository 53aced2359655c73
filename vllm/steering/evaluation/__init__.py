# SPDX-License-Identifier: Apache-2.0
"""Measures the effect of steering vectors and the damage that they do."""
