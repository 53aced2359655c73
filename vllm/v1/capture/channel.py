# SPDX-License-Identifier: Apache-2.0
"""From the workers to the front end that admitted a request, beside the steps.

Results and rows for driver-side consumers do not travel with the engine's
outputs: those exist only while steps run, and large rows would delay tokens.
Each front end listens at an address that its plans carry; a worker connects
when it first has something to say there.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import torch
import zmq

from vllm.logger import init_logger
from vllm.utils.network_utils import get_open_zmq_ipc_path, make_zmq_socket
from vllm.v1.capture.payload import RowsByTap
from vllm.v1.capture.tensors import put_back, set_aside
from vllm.v1.capture.types import CaptureChunk, CaptureResult
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

logger = init_logger(__name__)

MERGED_LAYER = -1
MERGED_HOOK = "*"


class KeyedValue(msgspec.Struct, array_like=True):
    """One entry of a payload that maps `(layer, hook)` to something."""

    layer: int
    hook: str
    value: Any = None
    tensor: torch.Tensor | None = None


class ResultMessage(msgspec.Struct, array_like=True, tag="result"):
    """What one stage's instance says of a request."""

    request_id: str
    instance: str
    stage: int
    status: str
    error: str | None
    payload: Any = None
    by_key: list[KeyedValue] | None = None
    tensors: list[torch.Tensor] = []
    """What `payload` has marks for."""

    @classmethod
    def of(
        cls, request_id: str, instance: str, stage: int, result: CaptureResult
    ) -> "ResultMessage":
        """The message for `result`; tensors in a keyed payload travel as such."""
        payload, by_key = result.payload, None
        if isinstance(payload, RowsByTap):
            by_key = [
                KeyedValue(*tap, value=payload.facts_of(tap), tensor=rows)
                for tap, rows in payload.items()
            ]
            payload = None
        elif isinstance(payload, dict) and all(isinstance(k, tuple) for k in payload):
            by_key = [
                KeyedValue(layer, hook, tensor=value)
                if isinstance(value, torch.Tensor)
                else KeyedValue(layer, hook, value=value)
                for (layer, hook), value in payload.items()
            ]
            payload = None
        tensors: list[torch.Tensor] = []
        return cls(
            request_id,
            instance,
            stage,
            result.status,
            result.error,
            set_aside(payload, tensors),
            by_key,
            tensors,
        )

    def result(self) -> CaptureResult:
        """The result as the instance gave it."""
        payload = put_back(self.payload, self.tensors)
        if self.by_key is not None:
            payload = _keyed_payload(self.by_key)
        key = (self.request_id, MERGED_LAYER, MERGED_HOOK)
        return CaptureResult(key, self.status, self.error, payload)  # type: ignore[arg-type]


def _keyed_payload(entries: list[KeyedValue]) -> dict[tuple[int, str], Any]:
    rows = RowsByTap()
    for entry in entries:
        tap = (entry.layer, entry.hook)
        if entry.tensor is not None and entry.value is not None:
            # The message's memory is read-only; a result is the receiver's own.
            rows.put(tap, entry.tensor.clone(), entry.value)
    if rows:
        return rows
    return {
        (entry.layer, entry.hook): entry.value if entry.tensor is None else entry.tensor
        for entry in entries
    }


class WireChunk(msgspec.Struct, array_like=True):
    """A `CaptureChunk` on its way to another process."""

    request_id: str
    layer: int
    hook: str
    tensor: torch.Tensor
    row_offset: int
    step_index: int
    metadata: dict[str, Any]

    @classmethod
    def of(cls, chunk: CaptureChunk) -> "WireChunk":
        """The wire form of `chunk`."""
        request_id, layer, hook = chunk.key
        return cls(
            request_id,
            layer,
            hook,
            chunk.tensor,
            chunk.row_offset,
            chunk.step_index,
            chunk.metadata,
        )

    def chunk(self) -> CaptureChunk:
        """The chunk again."""
        return CaptureChunk(
            (self.request_id, self.layer, self.hook),  # type: ignore[arg-type]
            self.tensor,
            self.tensor.dtype,
            self.row_offset,
            self.step_index,
            self.metadata,
        )


class ChunksMessage(msgspec.Struct, array_like=True, tag="chunks"):
    """Rows for a driver-side instance."""

    instance: str
    stage: int
    chunks: list[WireChunk]


class EndMessage(msgspec.Struct, array_like=True, tag="end"):
    """A request's streams at a driver-side instance are complete."""

    request_id: str
    instance: str
    stage: int
    sidecars: list[KeyedValue]


Message: TypeAlias = ResultMessage | ChunksMessage | EndMessage


class Outbox:
    """The workers' end: sends to any front end's address; any thread may call."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, Any] = {}
        self._encoder = MsgpackEncoder()
        self._lock = threading.Lock()

    def send(self, address: str, message: Message) -> None:
        """Queue `message` for `address`.

        A payload that cannot be encoded is replaced by a result that says so.
        """
        with self._lock:
            try:
                frames = self._encoder.encode(message)
            except Exception as error:
                if not isinstance(message, ResultMessage):
                    raise
                message.payload, message.by_key, message.tensors = None, None, []
                if message.status == "ok":
                    message.status = "partial_error"
                problem = f"the payload cannot be sent: {error}"
                message.error = f"{message.error}; {problem}".removeprefix("None; ")
                frames = self._encoder.encode(message)
            if address not in self._sockets:
                self._sockets[address] = make_zmq_socket(
                    self._context, address, zmq.PUSH, bind=False, linger=2000
                )
            self._sockets[address].send_multipart(frames, copy=False)

    def close(self) -> None:
        """Send what is queued, for at most two seconds, and close."""
        with self._lock:
            for socket in self._sockets.values():
                socket.close()
            self._sockets.clear()
        self._context.term()


class Inbox:
    """The front end's end: one thread that hands each message to `handle`."""

    def __init__(self, handle: Callable[[Message], None]) -> None:
        self.address = get_open_zmq_ipc_path()
        self._handle = handle
        self._context = zmq.Context()
        self._socket = make_zmq_socket(
            self._context, self.address, zmq.PULL, bind=True, linger=0
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="capture-inbox", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        decoder = MsgpackDecoder(Message, share_mem=False)
        while not self._closing.is_set():
            if not self._socket.poll(200):
                continue
            try:
                frames: Any = self._socket.recv_multipart(copy=True)
                self._handle(decoder.decode(frames))
            except Exception:
                # One bad message must not stop those of other requests.
                logger.exception("A message about captured rows was not understood")
        self._socket.close()

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._thread.join(timeout=5)
        self._context.term()
