# SPDX-License-Identifier: Apache-2.0
"""Capture over HTTP, beside the fields of requests."""
