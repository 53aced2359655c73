# SPDX-License-Identifier: Apache-2.0
"""From the workers to the front ends: messages over a socket, rows by handle."""
