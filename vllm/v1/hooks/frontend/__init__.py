# SPDX-License-Identifier: Apache-2.0
"""Hook functions in the front end: admission and results."""
