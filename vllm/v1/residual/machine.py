# SPDX-License-Identifier: Apache-2.0
"""Memory and threads that the machine or container offers."""

from functools import cache

import psutil

from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit
from vllm.utils.torch_utils import available_cpu_count

HOST_SHARE = 4
"""The default budget is the machine's memory divided by this."""


@cache
def memory_bytes() -> int:
    """The memory of the machine in bytes, or of the control group if that is less."""
    total = psutil.virtual_memory().total
    limit = get_cgroup_memory_limit()
    return total if limit is None else min(total, limit)


def writer_threads() -> int:
    """Maximum number of threads that write files: half of the cores, from 2 to 8."""
    return min(max(available_cpu_count() // 2, 2), 8)


@cache
def copy_threads() -> int:
    """Maximum number of threads that copy rows: a quarter of the cores, from 1 to 6."""
    return max(1, min(available_cpu_count() // 4, 6))
