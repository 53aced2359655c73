# SPDX-License-Identifier: Apache-2.0
"""Capture in a front-end process: admission, tracking of requests, results."""
