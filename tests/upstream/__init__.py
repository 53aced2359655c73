# SPDX-License-Identifier: Apache-2.0
"""Upstream's own tests of what the fork edits, on the woven tree."""
