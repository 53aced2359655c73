# SPDX-License-Identifier: Apache-2.0
"""Hook points on the residual stream: taps, custom ops and graph passes."""
