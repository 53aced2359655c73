# SPDX-License-Identifier: Apache-2.0
"""A worker that takes no change of steering while it is told so.

Given as `--worker-extension-cls`, so that each worker process imports it. Nobody else
may: it changes what workers do.
"""

import os
from pathlib import Path
from typing import Any

import torch

from tests.multiprocess.launch import FAULT
from vllm.v1.steering.worker import WorkerSteering

stage = WorkerSteering.stage_global


class Faulty:
    """Nothing is added to the worker itself."""


def staged(self: WorkerSteering, tiers: Any) -> None:
    """Fails behind everything that a rank does to prepare a change."""
    stage(self, tiers)
    flag, rank = Path(os.environ[FAULT]), torch.distributed.get_rank()
    if flag.exists() and int(flag.read_text()) == rank:
        raise MemoryError(f"no room for the rows of rank {rank}")


WorkerSteering.stage_global = staged  # type: ignore[method-assign]
