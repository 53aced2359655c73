# SPDX-License-Identifier: Apache-2.0
"""The pinned upstream release: which one, where from, unpacked."""
