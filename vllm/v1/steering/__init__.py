# SPDX-License-Identifier: Apache-2.0
"""Steering: changes to the residual stream that requests or the engine ask for."""
