# SPDX-License-Identifier: Apache-2.0
"""Steering in the engine core's process: slots, global vectors and the prefix cache."""
