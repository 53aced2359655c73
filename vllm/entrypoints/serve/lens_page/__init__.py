# SPDX-License-Identifier: Apache-2.0
"""The page that shows a live server."""
