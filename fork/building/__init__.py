# SPDX-License-Identifier: Apache-2.0
"""Builds the tree and its package from the upstream wheel and our files."""
