# SPDX-License-Identifier: Apache-2.0
"""The consumers that come with the fork."""
