# SPDX-License-Identifier: Apache-2.0
"""Readouts where requests come in and outputs go out."""
