# SPDX-License-Identifier: Apache-2.0
"""Where the rows of each step go in staging memory."""
