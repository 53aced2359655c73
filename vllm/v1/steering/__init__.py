# SPDX-License-Identifier: Apache-2.0
"""Steering: vectors that are added to the residual stream."""
