# SPDX-License-Identifier: Apache-2.0
"""The front end's end of shared rows: maps what workers lend, and gives it back.

Each block is mapped for itself and privately: what a caller writes into its tensors is
seen by nobody else, and the next rows in that memory are not seen by the caller.
"""

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
"""A message may be ahead of the segment that it names, but not for longer."""
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
FAILED = ctypes.c_void_p(-1).value

Block: TypeAlias = "ctypes.Array[ctypes.c_char]"


class Connection:
    """One worker that lends. One thread reads; blocks are given back on any."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.files: dict[int, int] = {}
        """Descriptors by the number of the segment."""
        self._dropped: deque[int] = deque()
        self._flushing = threading.Lock()

    def read_all(self) -> bool:
        """Take what the worker says of its segments; False once it has ended."""
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
        """Nobody holds a view of the block any more. Takes no lock that may wait."""
        self._dropped.append(lease)
        self.flush()

    def flush(self) -> None:
        """Tell the worker what was dropped, as far as the socket takes it."""
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
        """What is mapped stays so."""
        self.peer.close()
        for file in self.files.values():
            os.close(file)
        self.files.clear()


class Borrower:
    """Listens for the workers of one address. Belongs to the thread that decodes."""

    def __init__(self, address: str) -> None:
        """Listen; where that is impossible, workers find nobody and send copies."""
        self._connections: dict[int, Connection] = {}
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
        """Descriptors that are readable when `attend` has something to do."""
        listening = [] if self._listener is None else [self._listener.fileno()]
        return listening + list(self._connections)

    def attend(self) -> None:
        """Take what workers say, and tell them what was dropped; waits for nothing."""
        self._accept()
        for file, connection in list(self._connections.items()):
            connection.flush()
            if not connection.read_all():
                del self._connections[file]
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
        """The message is decoded: blocks live as long as tensors do."""
        self._of_message = {}

    def __call__(
        self, dtype: str, shape: tuple[int, ...], handle: dict[str, Any]
    ) -> torch.Tensor:
        """The tensor that a handle of a worker's `Lender` stands for.

        Raises:
            ConnectionError: its worker has ended before it could be mapped.

        """
        block = self._of_message.get(handle["lease"])
        if block is None:
            owner = self._owner(handle["segment"])
            block = mapped(owner, handle)
            self._of_message[handle["lease"]] = block
        kind: torch.dtype = getattr(torch, dtype)
        size = prod(shape) * kind.itemsize
        offset: int = handle["offset"]
        rows = torch.frombuffer(block, dtype=torch.uint8, count=size, offset=offset)
        return rows.view(kind).view(shape)

    def _owner(self, segment: int) -> Connection:
        """The connection over which a segment has come; waits for it."""
        deadline = monotonic() + ANNOUNCE_SECONDS
        while True:
            for connection in self._connections.values():
                if segment in connection.files:
                    return connection
            left = deadline - monotonic()
            if left <= 0:
                raise ConnectionError("the worker that lends these rows has ended")
            waiting = select.poll()
            for file in self.files:
                waiting.register(file, select.POLLIN)
            waiting.poll(1000 * left)
            self.attend()

    def close(self) -> None:
        """Stop listening. What is mapped stays so until it is dropped."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def mapped(owner: Connection, handle: dict[str, Any]) -> Block:
    """A block's bytes; the worker gets it back with the last view of them.

    `mmap.mmap` would keep a descriptor open for each block.
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
    weakref.finalize(block, _unmap, owner, lease, address, size).atexit = False
    return block


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
