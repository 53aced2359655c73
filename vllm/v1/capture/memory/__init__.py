# SPDX-License-Identifier: Apache-2.0
"""Host memory for captured rows, and copies into it."""
