# SPDX-License-Identifier: Apache-2.0
"""An error of one tensor-parallel rank before a collective, as an error of all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from vllm.distributed.parallel_state import get_tp_group


@contextmanager
def failing_together() -> Iterator[Callable[[], None]]:
    """Run what ranks compute on their own before a collective.

    Without this the others would wait in the collective for a rank that has failed. A
    collective of the host, with several ranks, so that the device is not waited for.

    Yields:
        What may be called before the end, where the collective is in the middle.

    Raises:
        Exception: that of this rank.
        RuntimeError: another rank has failed.

    """
    agreed = False

    def agree(error: Exception | None = None) -> None:
        nonlocal agreed
        agreed = True
        group = get_tp_group()
        failed = torch.tensor(error is not None, dtype=torch.int32, device="cpu")
        if group.world_size > 1:
            torch.distributed.all_reduce(failed, group=group.cpu_group)
        if failed and error is None:
            raise RuntimeError("another tensor-parallel rank failed; the log says why")

    try:
        yield agree
    except Exception as error:
        if not agreed:
            agree(error)
        raise
    if not agreed:
        agree()
