# SPDX-License-Identifier: Apache-2.0
"""What capture and steering share; neither imports the other."""
