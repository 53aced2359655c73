# SPDX-License-Identifier: Apache-2.0
"""The workers' end of shared rows: lends memory to a front end and gets it back.

A tensor that lies in a `SharedSegment` is not sent: the message says where it is, and
the memory stays as it is until the front end has let go of it. Beside the messages
there is a socket for each front end. Over it go the segments' descriptors, which front
ends this memory is for, and the numbers of what is given back. Its end says that the
front end has ended, however that happened.
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
"""Bytes below which a tensor is cheaper to send than to map."""
ANNOUNCE, RETIRE = 1, 2
HEAD = struct.Struct("<QQQ")
"""What a lender says of a segment: which of both, its number, its size."""
LEASE = struct.Struct("<Q")
"""What a front end gives back."""
LEASES_AT_ONCE = 4096
CREDENTIALS = struct.Struct("3i")


def socket_name(address: str) -> str:
    """The name, in no file system, that belongs to a front end's address."""
    return "\0vllm-capture-" + hashlib.sha256(address.encode()).hexdigest()[:40]


def is_own_user(peer: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(raw)[1] == os.geteuid())


class Lender(OOBTensorConsumer):
    """What one worker lends to one front end. One thread encodes; any may `collect`."""

    def __init__(self, address: str) -> None:
        """Connect to who listens for `address`; lends nothing if nobody does."""
        self.lent_bytes = 0
        """Bytes of rows that went by handle, so far; ..."""
        self.sent_bytes = 0
        """... and by copy."""
        self._lock = threading.Lock()
        self._peer = self._connected(address)
        self._announced: set[int] = set()
        self._leases: dict[int, torch.UntypedStorage] = {}
        self._numbers = count(1)
        self._of_message: dict[int, int] = {}
        """Leases of the message that is being encoded, by where their memory is."""

    def _connected(self, address: str) -> socket.socket | None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.connect(socket_name(address))
            if is_own_user(peer):
                peer.setblocking(False)
                return peer
        except OSError as error:
            logger.warning(
                "Captured rows are copied on their way to the front end, with which "
                "no memory can be shared: %s",
                error,
            )
        peer.close()
        return None

    def new_message(self) -> None:
        """Another message begins: what was lent before stays lent."""
        self._of_message = {}

    def revoke(self) -> None:
        """The message will not be sent."""
        for lease in self._of_message.values():
            self._leases.pop(lease, None)
        self._of_message = {}

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Where the tensor is, for the receiver; None if it must be sent."""
        handle = self._handle(tensor)
        if handle is None:
            self.sent_bytes += tensor.nbytes
        else:
            self.lent_bytes += tensor.nbytes
        return handle

    def _handle(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        if self._peer is None or not tensor.is_contiguous():
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
        assert start % ALIGNMENT == 0, "a block of shared memory is not aligned"
        return {
            "segment": segment.number,
            "lease": lease,
            "block": start,
            "block_bytes": size,
            "offset": tensor.data_ptr() - block,
        }

    def _announce(self, segment: SharedSegment) -> bool:
        """Let the front end have the segment, unless it has it."""
        if segment.number in self._announced:
            return True
        peer, file = self._peer, segment.file
        if peer is None or file is None:
            return False
        head = HEAD.pack(ANNOUNCE, segment.number, segment.size)
        try:
            socket.send_fds(peer, [head], [file])
        except BlockingIOError:
            return False  # It is behind with reading; the next message tries again.
        except OSError:
            self._end()
            return False
        self._announced.add(segment.number)
        return True

    def collect(self) -> None:
        """Take back what the front end has let go of, without waiting for anything."""
        if not self._lock.acquire(blocking=False):
            return  # Another thread is at it.
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
        """Let the front end close what does not exist any more."""
        if self._peer is None or not self._announced:
            return
        for number in self._announced - SEGMENTS.numbers():
            self._peer.send(HEAD.pack(RETIRE, number, 0))
            self._announced.discard(number)

    def _end(self) -> None:
        """The front end has ended: nobody holds anything any more."""
        peer, self._peer = self._peer, None
        self._leases.clear()
        if peer is not None:
            peer.close()

    @property
    def num_leases(self) -> int:
        """Blocks of memory that the front end holds."""
        return len(self._leases)

    @property
    def leased_bytes(self) -> int:
        """Their bytes; a block that was lent twice counts once."""
        blocks = {one.data_ptr(): one.nbytes() for one in list(self._leases.values())}
        return sum(blocks.values())

    def close(self) -> None:
        """End the connection: what the front end has mapped stays its own."""
        with self._lock:
            self._end()
