# SPDX-License-Identifier: Apache-2.0
"""Capture over HTTP: its own routes, and responses that carry rows."""
