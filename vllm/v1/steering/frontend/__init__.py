# SPDX-License-Identifier: Apache-2.0
"""Steering in the front end's process: admission, named modules, global vectors."""
