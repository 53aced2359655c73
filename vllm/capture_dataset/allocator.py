# SPDX-License-Identifier: Apache-2.0
"""Allocator settings for an engine that computes on the CPU in this process.

A step's temporary tensors take tens of megabytes each. By default glibc maps memory of
this size for each and unmaps it after use, so in every step the kernel clears the same
pages again, which takes more than a tenth of the time. See `mallopt(3)`.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameter numbers from glibc's `malloc.h`."""
KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory of any size for later tensors.

    Returns:
        Whether this is supported: only glibc has the setting.

    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
