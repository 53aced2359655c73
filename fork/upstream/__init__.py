# SPDX-License-Identifier: Apache-2.0
"""Pins, fetches and unpacks the upstream release."""
