# SPDX-License-Identifier: Apache-2.0
"""The ZMQ channel from workers to front ends, separate from the engine's outputs.

It carries results, rows for driver-side consumers, and counters. Engine outputs are not
used, because they exist only while steps run and large rows would delay tokens. Each
front end listens at an address that is in its plans; a worker connects when it first
sends a message there.
"""

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeAlias

import msgspec
import torch
import zmq

from vllm.logger import init_logger
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.memory.budget import collect_from
from vllm.v1.capture.results import put_back, request_key, sendable, set_aside
from vllm.v1.capture.stats import LaneCounters, MemoryCounters
from vllm.v1.capture.transport.addresses import local, new_address, reachable
from vllm.v1.capture.transport.borrower import Borrower
from vllm.v1.capture.transport.lender import Lender
from vllm.v1.capture.types import CaptureResult
from vllm.v1.residual.plugin_errors import message_of
from vllm.v1.residual.readout_plan import ReadoutCounters
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

logger = init_logger(__name__)

BOUND_MESSAGES = 4
"""High-water mark of a bounded connection, at each end."""

QUIET_SECONDS = 10.0
"""A lost message is logged if none was for this long before it."""

SEND_SECONDS = 60.0
"""A blocked sender gives up after this time."""


class ResultMessage(msgspec.Struct, array_like=True, tag="result"):
    """The result of a request at one instance and pipeline stage."""

    request_id: str
    instance: str
    stage: int
    status: str
    error: str | None
    payload: Any = None
    tensors: list[torch.Tensor] = []
    """The tensors for which `payload` contains placeholders."""

    @classmethod
    def of(
        cls, request_id: str, instance: str, stage: int, result: CaptureResult
    ) -> "ResultMessage":
        """Create the message; tensors in the payload are sent as tensors."""
        error = None if result.error is None else sendable(result.error)
        message = cls(request_id, instance, stage, result.status, error)
        try:
            message.payload = set_aside(result.payload, message.tensors)
        except Exception as problem:
            _give_up_payload(message, problem)
        return message

    def result(self) -> CaptureResult:
        """Recreate the result."""
        payload = put_back(self.payload, self.tensors)
        how: Any = self.status
        return CaptureResult(request_key(self.request_id), how, self.error, payload)


class ChunksMessage(msgspec.Struct, array_like=True, tag="chunks"):
    """Rows for a driver-side instance."""

    instance: str
    stage: int
    chunks: list[GroupChunk]


class EndMessage(msgspec.Struct, array_like=True, tag="end"):
    """The end of a request at a driver-side instance: all its rows were sent."""

    request_id: str
    instance: str
    stage: int
    ends: list[GroupEnd]


class CountersMessage(msgspec.Struct, array_like=True, tag="counters"):
    """The counters of a worker."""

    engine: int
    stage: int
    counters: dict[str, LaneCounters]
    reforwarded: int
    """Total number of cached tokens recomputed because they were captured."""
    adds: bool = False
    """Whether the receiving front end adds the counters to its metrics."""
    memory: MemoryCounters = msgspec.field(default_factory=MemoryCounters)
    readouts: dict[str, ReadoutCounters] = msgspec.field(default_factory=dict)
    """By kind."""


Message: TypeAlias = ResultMessage | ChunksMessage | EndMessage | CountersMessage


class _Link:
    """A connection to one address; sending is serialized by a lock."""

    def __init__(self, context: "zmq.Context[Any]", address: str, bounded: bool):
        self.lender = Lender(local(address))
        collect_from(self.lender)
        self._encoder = MsgpackEncoder(oob_tensor_consumer=self.lender)
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, BOUND_MESSAGES if bounded else 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_SECONDS * 1000))
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(reachable(address))

    def send(self, message: Message) -> None:
        with self._lock:
            self.lender.collect()
            try:
                frames = self._encoder.encode(message)
            except Exception as error:
                self.lender.revoke()
                if not isinstance(message, ResultMessage):
                    raise
                _give_up_payload(message, error)
                frames = self._encoder.encode(message)
            try:
                self._socket.send_multipart(frames, copy=False)
            except zmq.Again:
                self.lender.revoke()
                raise TimeoutError(
                    f"the front end has accepted no rows for {SEND_SECONDS:.0f} s"
                ) from None

    def close(self) -> None:
        with self._lock:
            self._socket.close()

    def end(self) -> None:
        """Close the connection for lent memory, after all messages were sent."""
        self.lender.close()


def _give_up_payload(message: ResultMessage, error: Exception) -> None:
    message.payload, message.tensors = None, []
    if message.status == "ok":
        message.status = "partial_error"
    problem = f"the payload cannot be sent: {message_of(error)}"
    message.error = f"{message.error}; {problem}".removeprefix("None; ")


class Outbox:
    """The workers' side: sends messages to front ends; thread-safe."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()

    def send(self, address: str, message: Message, bounded: bool = False) -> None:
        """Queue a message.

        A result's payload that cannot be encoded is replaced by an error.

        Args:
            address: the receiver's address.
            message: what to send.
            bounded: whether to block while the receiver is behind; set by the first
                message to the address.

        Raises:
            TimeoutError: the receiver has accepted nothing for `SEND_SECONDS`.

        """
        with self._lock:
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = _Link(self._context, address, bounded)
        link.send(message)

    def close(self) -> None:
        """Send queued messages, for at most two seconds, and close."""
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()
        self._context.term()
        for link in links:
            link.end()

    def lent(self) -> dict[str, int]:
        """The fields of `MemoryCounters` that concern front ends."""
        with self._lock:
            lenders = [link.lender for link in self._links.values()]
        return {
            "lent_bytes": sum(lender.lent_bytes for lender in lenders),
            "copied_bytes": sum(lender.sent_bytes for lender in lenders),
            "held_by_front_ends_bytes": sum(lender.leased_bytes for lender in lenders),
            "leases": sum(lender.num_leases for lender in lenders),
        }


class Inbox:
    """The front end's side: one thread that calls `handle` with each message."""

    def __init__(
        self,
        handle: Callable[[Message], None],
        address: str | None = None,
        bounded: bool = False,
        idle: Callable[[], Any] | None = None,
        host: str | None = None,
    ) -> None:
        """Start listening.

        Args:
            handle: called with each message; no other is read until it returns.
                Workers of this process call it too, with results.
            address: where to listen; None chooses a new address.
            bounded: whether to keep only a few unread messages, so that senders block.
            idle: called several times a second while no message arrives.
            host: the IP address at which workers of other hosts reach this one; None
                if there are none.

        """
        self._handle = handle
        self._idle = idle or (lambda: None)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, BOUND_MESSAGES if bounded else 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = new_address(self._socket, address, host)
        self._borrower = Borrower(local(self.address))
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="capture-inbox", daemon=True
        )
        self._thread.start()
        if not bounded:
            INBOXES[self.address] = handle

    def _run(self) -> None:
        decoder = MsgpackDecoder(
            Message, share_mem=False, oob_tensor_provider=self._borrower
        )
        decoder.pin_tensors = False  # The tensors stay on the host.
        quiet_until = 0.0
        while not self._closing.is_set():
            if not self._wait():
                self._idle()
                continue
            try:
                frames: Any = self._socket.recv_multipart(copy=False)
                self._handle(decoder.decode(frames))
            except ConnectionError as error:
                if monotonic() > quiet_until:  # Thousands may follow.
                    logger.error("Captured rows were lost on their way: %s", error)
                quiet_until = monotonic() + QUIET_SECONDS
            except Exception:
                # One bad message must not stop those of other requests.
                logger.exception("A message about captured rows was not understood")
            finally:
                self._borrower.end_message()
        self._socket.close()
        self._borrower.close()

    def _wait(self) -> bool:
        """Wait for a message for a short time, and serve lending workers meanwhile."""
        poller = zmq.Poller()
        for waited in (self._socket, *self._borrower.files):
            poller.register(waited, zmq.POLLIN)
        came = dict(poller.poll(200))
        self._borrower.attend()
        return self._socket in came

    def close(self) -> None:
        """Stop listening."""
        INBOXES.pop(self.address, None)
        self._closing.set()
        self._thread.join(timeout=5)
        if self._thread.is_alive():  # It is blocked in a full queue.
            return
        # Seen once to wait for over a minute although its only socket was closed, while
        # the engine's process ended.
        ending = threading.Thread(target=self._context.term, daemon=True)
        ending.start()
        ending.join(timeout=2)


INBOXES: dict[str, Callable[[Message], None]] = {}
"""What takes the messages of the unbounded inboxes of this process, by address.

If the engine core runs in the process of its `LLM`, results with rows are passed by a
call of it. Only the channel keeps messages of one worker in order and limits them,
so rows for driver-side consumers, streamed rows and counters use it here too.
"""
