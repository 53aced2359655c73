# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory for the rows of large steps, which consumers then hold.

Pinning takes as long as computing many steps. It is therefore done ahead, on a separate
thread, in slabs from which pages of any size are allocated. While there is no free
page, the rows go through the host ring.
"""

import atexit
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from vllm.logger import init_logger
from vllm.utils.math_utils import round_up
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.memory.buffer_pool import Bytes, Extents, Slab, Slabs
from vllm.v1.capture.memory.shared import ALIGNMENT, SharedSegment

logger = init_logger(__name__)

OWNER = "pinned_row_memory"
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of CUDA's driver."""

_pinning: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_exiting = threading.Event()


class Pages:
    """Allocates pages from pinned slabs.

    One thread allocates; a page may be freed on any thread.
    """

    def __init__(
        self,
        slab_bytes: int,
        max_bytes: int,
        pin: Callable[[Bytes], None],
        ahead_bytes: int = 0,
    ) -> None:
        """Start pinning the first slab.

        Args:
            slab_bytes: size of a slab, and the maximum size of a page.
            max_bytes: maximum size of all slabs.
            pin: pins memory; raises RuntimeError if that fails.
            ahead_bytes: how much to keep free for later steps; at least one slab.

        """
        self._slab_bytes = round_up(slab_bytes, ALIGNMENT)
        self._most = max_bytes // self._slab_bytes
        self._ahead = max(ahead_bytes // self._slab_bytes, 1)
        self._pin = pin
        self._slabs = Slabs()
        self._lock = threading.Lock()
        """Guards the list of slabs and their free parts."""
        self._growing: threading.Thread | None = None
        self._grow()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a page of this shape; None if no pinned memory is free (yet)."""
        with self._lock:
            page = self._slabs.take(shape, dtype)
            spare = len(self._slabs.spare)
        if spare < self._ahead:
            self._grow()
        return page

    def close(self) -> None:
        """Pin no further slab. A closing engine would go on for gigabytes."""
        self._most = 0

    def trim(self) -> None:
        """Return slabs to the system that were unused since the last call.

        The slabs kept ahead for later steps stay.
        """
        with self._lock:
            spare = self._slabs.spare
            unused = [slab for slab in spare[self._ahead :] if not slab.needed]
            self._slabs.all = [slab for slab in self._slabs.all if slab not in unused]
            for slab in self._slabs.all:
                slab.needed = False
        for slab in unused:
            BUDGET.give_back(OWNER, slab.segment.size)

    def _grow(self) -> None:
        if self._growing is not None and self._growing.is_alive():
            return
        if len(self._slabs.all) < self._most and BUDGET.fits(self._slab_bytes):
            self._growing = threading.Thread(
                target=self._add_slabs, name="capture-pin", daemon=True
            )
            _pinning.add(self._growing)
            self._growing.start()

    def _add_slabs(self) -> None:
        added = True
        while added and len(self._slabs.all) < self._most and not _exiting.is_set():
            added = self._add_slab()
            with self._lock:
                spare = len(self._slabs.spare)
            if spare >= self._ahead:
                return

    def _add_slab(self) -> bool:
        if not BUDGET.take(OWNER, self._slab_bytes):
            return False
        try:
            segment = SharedSegment(self._slab_bytes)
            segment.populate()  # Populated memory is pinned much faster.
            self._pin(segment.memory)
        except (RuntimeError, OSError) as error:
            BUDGET.give_back(OWNER, self._slab_bytes)
            self._most = len(self._slabs.all)
            if not threading.main_thread().is_alive():
                return False  # The interpreter is exiting and starts no threads.
            logger.warning(
                "No more than %d MiB of host memory can be pinned for captured rows; "
                "other rows are copied once more: %s",
                len(self._slabs.all) * self._slab_bytes >> 20,
                error,
            )
            return False
        with self._lock:
            self._slabs.all.append(Slab(segment, Extents(self._slab_bytes)))
        return True


def pin(memory: Bytes, device: torch.device) -> None:
    """Pin `memory` for `device`, if the platform supports pinning.

    Torch's own pinned allocations are not used, because they are up to twice as large
    as requested.

    Raises:
        RuntimeError: pinning failed.

    """
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    if not is_pin_memory_available():
        return
    tensor = torch.from_numpy(memory)
    with torch.cuda.device(device), allowed_while_recording():
        pin_tensor(tensor)
    weakref.finalize(memory, _unpin, tensor.data_ptr()).atexit = False


def _unpin(address: int) -> None:
    with allowed_while_recording():
        torch.cuda.cudart().cudaHostUnregister(address)


@contextmanager
def allowed_while_recording() -> Iterator[None]:
    """Let this thread pin and unpin memory while another one records a CUDA graph.

    By default such a call fails and invalidates the recording, because CUDA refuses to
    all threads what may depend on the thread that records
    (`cuThreadExchangeStreamCaptureMode` in the CUDA driver API). Pinning memory does
    not.
    """
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@atexit.register
def _wait_at_exit() -> None:
    """Let threads finish the slab that they are pinning.

    The interpreter would end such a thread when the call returns, within C++ functions
    that must not be left that way, and the process would abort.
    """
    _exiting.set()
    for thread in list(_pinning):
        thread.join()
