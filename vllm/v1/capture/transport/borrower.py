# SPDX-License-Identifier: Apache-2.0
"""The front end's side of rows in shared memory: maps lent blocks, and returns them.

Each block has its own private mapping, so what the caller writes into its tensors is
visible to no one else. The mapping ends when the last tensor in it is freed; only then
does the worker reuse the block.
"""

import asyncio
import ctypes
import mmap
import os
import select
import socket
import threading
import weakref
from collections import deque
from functools import cache
from math import prod
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, TypeAlias

import torch

from vllm.logger import init_logger
from vllm.v1.capture.transport.lender import (
    ANNOUNCE,
    HEAD,
    LEASE,
    LEASES_AT_ONCE,
    is_own_user,
    socket_name,
)

logger = init_logger(__name__)

ANNOUNCE_SECONDS = 10.0
"""How long to wait for a segment that a message names; messages may arrive first."""
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
FAILED = ctypes.c_void_p(-1).value

Block: TypeAlias = "ctypes.Array[ctypes.c_char]"


class Connection:
    """The connection to one lending worker.

    One thread reads; blocks may be returned on any thread.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.files: dict[int, int] = {}
        """File descriptors by segment number."""
        self._dropped: deque[int] = deque()
        self._flushing = threading.Lock()

    def read_all(self) -> bool:
        """Read the worker's messages about its segments; False once it has ended."""
        while True:
            try:
                head, files, _, _ = socket.recv_fds(self.peer, HEAD.size, 1)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not head:
                return False
            what, number, _ = HEAD.unpack(head)
            if what == ANNOUNCE:
                self.files[number] = files[0]
            else:
                os.close(self.files.pop(number))

    def drop(self, lease: int) -> None:
        """Return a block that has no view left; called by finalizers, never blocks."""
        self._dropped.append(lease)
        self.flush()

    def flush(self) -> None:
        """Send the returned leases to the worker, as far as the socket accepts them."""
        if not self._dropped or not self._flushing.acquire(blocking=False):
            return
        packed: list[int] = []
        try:
            while self._dropped:
                while self._dropped and len(packed) < LEASES_AT_ONCE:
                    packed.append(self._dropped.popleft())
                self.peer.send(b"".join([LEASE.pack(lease) for lease in packed]))
                packed = []
        except BlockingIOError:
            self._dropped.extend(packed)  # `flush` is called again soon.
        except OSError:
            self._dropped.clear()  # The worker is gone, and its memory with it.
        finally:
            self._flushing.release()

    def close(self) -> None:
        """Close the connection; existing mappings stay."""
        self.peer.close()
        for file in self.files.values():
            os.close(file)
        self.files.clear()


class Borrower:
    """Accepts workers that lend to one address; used on the decoding thread only."""

    def __init__(self, address: str) -> None:
        """Listen. If that fails, workers cannot connect and send copies."""
        self._connections: dict[int, Connection] = {}
        self._ended: set[int] = set()
        """Segments of workers that have ended."""
        self._of_message: dict[int, Block] = {}
        self._listener: socket.socket | None = None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(socket_name(address))
            listener.listen()
            listener.setblocking(False)
            self._listener = listener
        except OSError as error:
            listener.close()
            logger.warning("No memory is shared with the workers: %s", error)

    @property
    def files(self) -> list[int]:
        """File descriptors to poll; if one is readable, call `attend`."""
        listening = [] if self._listener is None else [self._listener.fileno()]
        return listening + list(self._connections)

    def attend(self) -> None:
        """Read from and write to the workers, without blocking."""
        self._accept()
        for file, connection in list(self._connections.items()):
            connection.flush()
            if not connection.read_all():
                del self._connections[file]
                self._ended |= connection.files.keys()
                connection.close()

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            if is_own_user(peer):
                peer.setblocking(False)
                self._connections[peer.fileno()] = Connection(peer)
            else:
                peer.close()

    def end_message(self) -> None:
        """Forget the blocks of a decoded message; its tensors keep them alive."""
        self._of_message = {}

    def __call__(
        self, dtype: str, shape: tuple[int, ...], handle: dict[str, Any]
    ) -> torch.Tensor:
        """Map the tensor that a handle from a worker's `Lender` describes.

        Args:
            dtype: name of the tensor's dtype.
            shape: of the tensor.
            handle: as `Lender` returns it.

        Raises:
            ConnectionError: the worker ended before the memory could be mapped.

        """
        block = self._of_message.get(handle["lease"])
        if block is None:
            owner = self._owner(handle["segment"])
            block = mapped(owner, handle)
            self._of_message[handle["lease"]] = block
        kind: torch.dtype = getattr(torch, dtype)
        strides = handle.get("strides")
        num = prod(shape)
        if strides is not None and num:  # Up to the last value.
            num = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
        size, offset = num * kind.itemsize, handle["offset"]
        flat = torch.frombuffer(block, dtype=torch.uint8, count=size, offset=offset)
        rows = flat.view(kind)
        return rows.view(shape) if strides is None else rows.as_strided(shape, strides)

    def _owner(self, segment: int) -> Connection:
        """The connection that announced a segment; waits for the announcement."""
        deadline = monotonic() + ANNOUNCE_SECONDS
        while True:
            for connection in self._connections.values():
                if segment in connection.files:
                    return connection
            left = deadline - monotonic()
            if left <= 0 or segment in self._ended:
                raise ConnectionError("the worker that lends these rows has ended")
            waiting = select.poll()
            for file in self.files:
                waiting.register(file, select.POLLIN)
            waiting.poll(1000 * left)
            self.attend()

    def close(self) -> None:
        """Stop listening; existing mappings stay until they are freed."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def mapped(owner: Connection, handle: dict[str, Any]) -> Block:
    """Map a block; it is returned to the worker when its last view is gone.

    `mmap(2)` is called directly, because `mmap.mmap` keeps a file descriptor open for
    each mapping.
    """
    file, lease = owner.files[handle["segment"]], handle["lease"]
    start, size = handle["block"], handle["block_bytes"]
    address = _libc().mmap(None, size, READ_WRITE, mmap.MAP_PRIVATE, file, start)
    if address == FAILED:  # The process has too many mappings.
        copy = (ctypes.c_char * size)()
        if os.preadv(file, [copy], start) != size:
            raise ConnectionError("a segment of shared memory is too short")
        owner.drop(lease)
        return copy
    block = (ctypes.c_char * size).from_address(address)
    mapping = owner, lease, address, size
    weakref.finalize(block, _release, _unmapping(), mapping).atexit = False
    return block


Mapping: TypeAlias = tuple[Connection, int, int, int]
"""The owner, the lease, the address and the size of a block."""


def _release(unmapping: "SimpleQueue[Mapping]", mapping: Mapping) -> None:
    """Called when a block has no view left; may interrupt any code, on any thread.

    The kernel takes milliseconds to unmap 100 MB, in which an event loop must serve
    others.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _unmap(*mapping)
    else:
        unmapping.put(mapping)


@cache
def _unmapping() -> "SimpleQueue[Mapping]":
    """A queue of mappings that a thread ends."""
    queue: SimpleQueue[Mapping] = SimpleQueue()

    def unmap_all() -> None:
        while True:
            _unmap(*queue.get())

    Thread(target=unmap_all, name="capture-unmap", daemon=True).start()
    return queue


def _unmap(owner: Connection, lease: int, address: int, size: int) -> None:
    _libc().munmap(address, size)
    owner.drop(lease)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    return libc
