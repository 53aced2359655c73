# SPDX-License-Identifier: Apache-2.0
"""The routes of patching: sweeps, and runs that are dropped."""
