# SPDX-License-Identifier: Apache-2.0
"""What a user writes: vectors, entries, files and where they come from."""
