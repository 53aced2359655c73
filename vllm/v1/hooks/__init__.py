# SPDX-License-Identifier: Apache-2.0
"""Functions that run at hook points inside the forward pass, for single requests."""
