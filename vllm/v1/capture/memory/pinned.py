# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory that steps of many rows are copied to, and that consumers hold.

Pinning memory takes as long as computing many steps. It is done ahead, on a thread of
its own, in slabs that pages of any size are cut from; where there is none yet, the
step's rows take the other way, over the host ring.
"""

import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.utils.math_utils import round_up
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.capture.memory.buffer_pool import Bytes, lent

logger = init_logger(__name__)

ALIGNMENT = 4096
"""Bytes that pages begin at multiples of."""


class Extents:
    """The free parts of `[0, size)`; the first that suffices is taken from."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]
        """`(start, stop)` of each, ascending; none touches the next."""

    @property
    def is_free(self) -> bool:
        """Whether nothing is taken."""
        return self._free == [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Where `size` more begin; None if no part suffices."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                rest = [(start + size, stop)] if stop - start > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """What was taken at `start` is free."""
        stop = start + size
        index = bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Memory that was pinned at once."""

    memory: Bytes
    extents: Extents


class Pages:
    """Cuts pages out of slabs. One thread takes; any thread may let go of a page."""

    def __init__(
        self, slab_bytes: int, max_bytes: int, pin: Callable[[Bytes], None]
    ) -> None:
        """Begin to pin the first slab.

        Args:
            slab_bytes: of each slab; no page is larger.
            max_bytes: of all slabs.
            pin: pins memory; raises RuntimeError where that fails.

        """
        self._slab_bytes = round_up(slab_bytes, ALIGNMENT)
        self._most = max_bytes // self._slab_bytes
        self._pin = pin
        self._slabs: list[Slab] = []
        self._returned: deque[tuple[Extents, int, int]] = deque()
        """No lock: pages end wherever the interpreter frees an object."""
        self._growing: threading.Thread | None = None
        self._grow()

    def take(
        self, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A page `[num_rows, width]`; None if there is no memory for it, or not yet."""
        num_bytes = num_rows * width * dtype.itemsize
        size = round_up(num_bytes, ALIGNMENT)
        while self._returned:
            extents, first, returned = self._returned.popleft()
            extents.give_back(first, returned)
        page = None
        for slab in self._slabs:
            start = slab.extents.take(size)
            if start is not None:
                memory = slab.memory[start : start + num_bytes]
                page = lent(memory, self._returned.append, (slab.extents, start, size))
                break
        if not any(slab.extents.is_free for slab in self._slabs):
            self._grow()  # One is kept for a step to come.
        return None if page is None else page.view(dtype).view(num_rows, width)

    def wait(self) -> None:
        """Until no slab is being pinned any more."""
        if self._growing is not None:
            self._growing.join()

    def _grow(self) -> None:
        if self._growing is not None and self._growing.is_alive():
            return
        if len(self._slabs) < self._most:
            self._growing = threading.Thread(
                target=self._add_slab, name="capture-pin", daemon=True
            )
            self._growing.start()

    def _add_slab(self) -> None:
        memory: Bytes = np.empty(self._slab_bytes, dtype=np.uint8)
        try:
            self._pin(memory)
        except RuntimeError as error:
            self._most = len(self._slabs)
            logger.warning(
                "No more than %d MiB of host memory can be pinned for captured rows; "
                "others are copied once more: %s",
                len(self._slabs) * self._slab_bytes >> 20,
                error,
            )
            return
        self._slabs.append(Slab(memory, Extents(self._slab_bytes)))


def pin(memory: Bytes, device: torch.device) -> None:
    """Let `device` copy to `memory` by itself, where that is possible.

    Not by an allocation of torch's, which takes up to twice as much.

    Raises:
        RuntimeError: the system does not allow it.

    """
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    if not is_pin_memory_available():
        return
    tensor = torch.from_numpy(memory)
    tensor.zero_()  # What the process has already is pinned much faster.
    with torch.cuda.device(device):
        pin_tensor(tensor)
    unpin = torch.cuda.cudart().cudaHostUnregister
    weakref.finalize(memory, unpin, tensor.data_ptr()).atexit = False
