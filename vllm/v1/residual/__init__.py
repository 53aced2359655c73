# SPDX-License-Identifier: Apache-2.0
"""What capture and steering share; imports neither of them."""
