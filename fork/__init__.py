# SPDX-License-Identifier: Apache-2.0
"""How the upstream release becomes the fork: fetch, weave, overlay, package."""
