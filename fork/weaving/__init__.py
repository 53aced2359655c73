# SPDX-License-Identifier: Apache-2.0
"""Weaves a release: edit files and decoder layers, with results cached."""
