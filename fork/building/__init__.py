# SPDX-License-Identifier: Apache-2.0
"""From the wheel and our files to the built tree and its package."""
