# SPDX-License-Identifier: Apache-2.0
"""Code shared by capture and steering, which do not import each other."""
