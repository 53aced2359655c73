# SPDX-License-Identifier: Apache-2.0
"""How long what has been captured may take to be delivered when an engine stops.

Upstream kills what does not stop in time: an executor its workers after
`VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS`, a front end the engine's process after
`--shutdown-timeout`, which is zero unless one asks for more.
"""

import multiprocessing
from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

UNHURRIED_SECONDS = 30.0
"""Where nobody kills: the worker lives in the process of its caller."""

EXECUTOR_SECONDS = 10.0
"""What an executor may take to stop, beyond what it gives its workers."""


def flush_seconds() -> float:
    """How long a worker may flush; what is not delivered by then is reported lost."""
    if multiprocessing.parent_process() is None:
        return UNHURRIED_SECONDS
    # A second less than it has: the losses must be reported before the kill.
    return max(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS - 1.0, 1.0)


def process_seconds(vllm_config: "VllmConfig", asked: float | None) -> float | None:
    """How long the engine's process may take to stop, once it was told to.

    Args:
        vllm_config: of the engine.
        asked: what it has without capture; None stands for upstream's default.

    """
    if not vllm_config.capture_config.enabled or asked is None:
        return asked
    return max(asked, envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + EXECUTOR_SECONDS)
