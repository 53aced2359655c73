# SPDX-License-Identifier: Apache-2.0
"""Time limits for delivering captured rows when an engine stops.

Upstream kills processes that do not stop in time: an executor kills its workers after
`VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS`, a front end kills the engine process after
`--shutdown-timeout`, whose default is zero.
"""

import multiprocessing
from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

UNHURRIED_SECONDS = 30.0
"""Limit for a worker in the caller's own process, which nothing kills."""

EXECUTOR_SECONDS = 10.0
"""Time for the executor to stop, in addition to that of its workers."""


def flush_seconds() -> float:
    """Seconds for a worker to deliver its rows; the rest is reported as lost."""
    if multiprocessing.parent_process() is None:
        return UNHURRIED_SECONDS
    # One second less than the limit: losses must be reported before the kill.
    return max(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS - 1.0, 1.0)


def process_seconds(vllm_config: "VllmConfig", limit: float | None) -> float | None:
    """Seconds for the engine process to stop, after it was told to.

    Args:
        vllm_config: of the engine.
        limit: the limit without capture; None stands for upstream's default.

    """
    if not vllm_config.capture_config.enabled or limit is None:
        return limit
    return max(limit, envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + EXECUTOR_SECONDS)
