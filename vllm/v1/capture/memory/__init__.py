# SPDX-License-Identifier: Apache-2.0
"""Host memory for captured rows: how much there may be, and where it lies."""
