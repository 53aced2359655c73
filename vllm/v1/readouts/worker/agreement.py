# SPDX-License-Identifier: Apache-2.0
"""An error of one tensor-parallel rank before a collective, as an error of all."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm.distributed.parallel_state import get_tp_group


@contextmanager
def failing_together() -> Iterator[None]:
    """Run what ranks compute on their own before a collective.

    Without this the others would wait in the collective for a rank that has failed. A
    collective of the host, with several ranks, so that the device is not waited for.

    Raises:
        Exception: that of this rank.
        RuntimeError: another rank has failed.

    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    group = get_tp_group()
    failed = torch.tensor(error is not None, dtype=torch.int32, device="cpu")
    if group.world_size > 1:
        torch.distributed.all_reduce(failed, group=group.cpu_group)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("another tensor-parallel rank failed; the log says why")
