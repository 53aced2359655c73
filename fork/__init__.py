# SPDX-License-Identifier: Apache-2.0
"""Builds the fork from an upstream release: fetch, weave, overlay, package."""
