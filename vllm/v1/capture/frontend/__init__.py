# SPDX-License-Identifier: Apache-2.0
"""Capture in a front end's process: admission, results, the state of requests."""
