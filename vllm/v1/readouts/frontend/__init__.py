# SPDX-License-Identifier: Apache-2.0
"""Readouts in the front end: admission, API methods and results."""
