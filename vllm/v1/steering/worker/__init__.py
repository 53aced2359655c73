# SPDX-License-Identifier: Apache-2.0
"""Steering in a worker's process: tables, programs and gates on the device."""
