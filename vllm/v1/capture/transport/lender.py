# SPDX-License-Identifier: Apache-2.0
"""The worker's side of rows in shared memory: lends blocks to a front end.

A tensor in a `SharedSegment` is not sent. The message contains a handle with its
location, and the memory is not reused until the front end has returned it. In addition
to the message channel there is a Unix socket for each front end. The worker sends the
file descriptors of segments over it, the front end the numbers of returned leases. When
the front end ends for any reason, the socket is closed and all leases end.
"""

import hashlib
import os
import socket
import struct
import threading
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.v1.capture.memory.shared import ALIGNMENT, SEGMENTS, SharedSegment
from vllm.v1.serial_utils import OOBTensorConsumer

logger = init_logger(__name__)

LEAST_LENT = 4 << 10
"""Bytes below which sending a tensor is cheaper than mapping it."""
ANNOUNCE, RETIRE = 1, 2
HEAD = struct.Struct("<QQQ")
"""Message of a lender: `ANNOUNCE` or `RETIRE`, segment number, size in bytes."""
LEASE = struct.Struct("<Q")
"""Message of a front end: the number of a returned lease."""
LEASES_AT_ONCE = 4096
CREDENTIALS = struct.Struct("3i")


def socket_name(address: str) -> str:
    """The abstract Unix socket name for the front end at `address`."""
    return "\0vllm-capture-" + hashlib.sha256(address.encode()).hexdigest()[:40]


def is_own_user(peer: socket.socket) -> bool:
    """Whether the peer process runs as the same user."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(raw)[1] == os.geteuid())


class Lender(OOBTensorConsumer):
    """The memory that a worker lends to one front end.

    Called by the message encoder for each tensor. One thread encodes at a time; any
    thread may call `collect`.
    """

    def __init__(self, address: str) -> None:
        """Connect to the front end at `address`; without a connection, lend nothing."""
        self.lent_bytes = 0
        """Total bytes of rows passed by handle."""
        self.sent_bytes = 0
        """Total bytes of rows sent as copies."""
        self._lock = threading.Lock()
        self._refusal: OSError | None = None
        """Why there is no connection, until it was logged."""
        self._peer = self._connected(address)
        self._announced: set[int] = set()
        self._leases: dict[int, torch.UntypedStorage] = {}
        self._numbers = count(1)
        self._of_message: dict[int, int] = {}
        """Leases of the message that is being encoded, by address of the block."""

    def _connected(self, address: str) -> socket.socket | None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.connect(socket_name(address))
            if is_own_user(peer):
                peer.setblocking(False)
                return peer
        except OSError as error:
            self._refusal = error
        peer.close()
        return None

    def new_message(self) -> None:
        """Start another message; leases of earlier ones stay."""
        self._of_message = {}

    def revoke(self) -> None:
        """End the leases of the current message, which will not be sent."""
        for lease in self._of_message.values():
            self._leases.pop(lease, None)
        self._of_message = {}

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """A handle for the tensor, which the receiver maps; None if it must be sent."""
        handle = self._handle(tensor)
        if handle is None:
            self.sent_bytes += tensor.nbytes
            self._say_why(tensor)
        else:
            self.lent_bytes += tensor.nbytes
        return handle

    def _say_why(self, tensor: torch.Tensor) -> None:
        """Log once, with the first rows; counters may go to one that has ended."""
        error = self._refusal
        if error is not None and tensor.nbytes >= LEAST_LENT:
            self._refusal = None
            logger.warning(
                "Captured rows are copied to the front end, because no memory can be "
                "shared with it: %s",
                error,
            )

    def _handle(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        if self._peer is None:
            return None
        storage = tensor.untyped_storage()
        block, size = storage.data_ptr(), storage.nbytes()
        lease = self._of_message.get(block)
        if lease is None and tensor.nbytes < LEAST_LENT:
            return None
        segment = SEGMENTS.find(block, size)
        if segment is None or not self._announce(segment):
            return None
        if lease is None:
            lease = self._of_message[block] = next(self._numbers)
            self._leases[lease] = storage
        start = block - segment.address
        # The rows of one tap, as a tensor of their own, may begin within a page.
        before = start % ALIGNMENT
        handle: dict[str, Any] = {
            "segment": segment.number,
            "lease": lease,
            "block": start - before,
            "block_bytes": size + before,
            "offset": tensor.data_ptr() - block + before,
        }
        if not tensor.is_contiguous():
            handle["strides"] = tensor.stride()
        return handle

    def _announce(self, segment: SharedSegment) -> bool:
        """Send the segment's descriptor to the front end, unless it has it."""
        if segment.number in self._announced:
            return True
        peer = self._peer
        if peer is None:
            return False
        head = HEAD.pack(ANNOUNCE, segment.number, segment.size)
        try:
            socket.send_fds(peer, [head], [segment.file])
        except BlockingIOError:
            return False  # The socket is full; the next message tries again.
        except OSError:
            self._end()
            return False
        self._announced.add(segment.number)
        return True

    def collect(self) -> None:
        """End the leases that the front end has returned, without blocking."""
        if not self._lock.acquire(blocking=False):
            return  # Another thread does it.
        try:
            self._receive()
            self._retire()
        except BlockingIOError:
            pass
        except OSError:
            self._end()
        finally:
            self._lock.release()

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            while self._peer is not None:
                packet = self._peer.recv(LEASE.size * LEASES_AT_ONCE)
                if not packet:
                    self._end()
                    return
                for (lease,) in LEASE.iter_unpack(packet):
                    self._leases.pop(lease, None)

    def _retire(self) -> None:
        """Tell the front end which segments no longer exist."""
        if self._peer is None or not self._announced:
            return
        for number in self._announced - SEGMENTS.numbers():
            self._peer.send(HEAD.pack(RETIRE, number, 0))
            self._announced.discard(number)

    def _end(self) -> None:
        """End all leases: the front end has ended."""
        peer, self._peer = self._peer, None
        self._leases.clear()
        if peer is not None:
            peer.close()

    @property
    def num_leases(self) -> int:
        """Number of leases that the front end holds."""
        return len(self._leases)

    @property
    def leased_bytes(self) -> int:
        """Bytes of the blocks that the front end holds, each counted once."""
        blocks = {one.data_ptr(): one.nbytes() for one in list(self._leases.values())}
        return sum(blocks.values())

    def close(self) -> None:
        """Close the connection; the front end's mappings stay valid."""
        with self._lock:
            self._end()
