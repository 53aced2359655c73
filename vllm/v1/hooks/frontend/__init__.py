# SPDX-License-Identifier: Apache-2.0
"""Hook functions at admission."""
