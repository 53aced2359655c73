# SPDX-License-Identifier: Apache-2.0
"""A worker that fails to change its steering while a file names it.

Used as `--worker-extension-cls`, so that each worker process imports it. Other
processes must not import it, because it changes the worker's code.
"""

import os
from pathlib import Path
from typing import Any

import torch

from tests.multiprocess.launch import FAULT
from vllm.v1.steering.worker.worker import WorkerSteering

opened = WorkerSteering.__init__
stage = WorkerSteering.stage_global
engines: list[int] = []
"""The data-parallel index of this worker's engine."""


class Faulty:
    """Adds nothing to the worker itself."""


def opening(self: WorkerSteering, vllm_config: Any, *others: Any) -> None:
    """Record the engine of this worker."""
    engines[:] = [vllm_config.parallel_config.data_parallel_index]
    opened(self, vllm_config, *others)


def staged(self: WorkerSteering, tiers: Any) -> None:
    """Fail after a rank has prepared a change completely."""
    stage(self, tiers)
    flag, rank = Path(os.environ[FAULT]), torch.distributed.get_rank()
    if flag.exists() and flag.read_text() in (str(rank), f"engine {engines[0]}"):
        raise MemoryError(f"no room for the rows of rank {rank}")


WorkerSteering.__init__ = opening  # type: ignore[method-assign]
WorkerSteering.stage_global = staged  # type: ignore[method-assign]
