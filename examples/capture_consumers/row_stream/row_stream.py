# SPDX-License-Identifier: Apache-2.0
"""A streaming sink, which writes rows as lines of JSON while the model generates.

vllm serve MODEL --capture-consumers row_stream:to=/data/rows.jsonl
vllm serve MODEL --capture-consumers row_stream:to=tcp://127.0.0.1:9000

A request contains {"capture": {"row_stream": {"hooks": ..., "positions": ...}}}. Each
chunk of rows is a line with "request", "layer", "hook", "positions", "dtype", "shape"
and "data" (base64 of the rows' bytes); a line with "num_rows" ends a stream.
"""

import base64
import json
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, cast

import torch

from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureContext,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    CaptureSpec,
)


def connect(to: str) -> BinaryIO:
    """Open a file for appending, or a connection `tcp://HOST:PORT`."""
    if not to.startswith("tcp://"):
        Path(to).parent.mkdir(parents=True, exist_ok=True)
        return open(to, "ab", buffering=0)
    host, _, port = to.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    return cast(BinaryIO, connection.makefile("wb", buffering=0))


class RowStream:
    """A `CaptureSink`, which needs no base class, only its methods.

    All methods are called on one thread, which belongs to the instance. An exception
    that they raise becomes the error of the stream for which they were called.
    """

    location: ClassVar[Literal["worker", "driver"]] = "worker"
    reads_client_spec: ClassVar[bool] = True
    instance_name = "row_stream"  # the framework sets the configured name
    truncates: ClassVar[bool] = True
    """Rows of generated tokens arrive at once, not when the request has finished; a
    stop string may void the last of them, which `num_rows` reports at the end."""

    def __init__(self, vllm_config: Any, params: dict[str, Any]) -> None:
        if "to" not in params:
            raise ValueError("give a file or tcp://HOST:PORT as row_stream:to=...")
        self._to = str(params["to"])
        # Opened with the first row, because the front end has an instance too, for
        # validation.
        self._file: BinaryIO | None = None
        self._results: dict[CaptureKey, CaptureResult] = {}

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Check a request's options: `{"hooks": ..., "positions": ...}`."""
        return parse_spec(raw, ctx, f"capture.{self.instance_name}")

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        """Send the rows that a step has computed."""
        request, layer, hook = chunk.key
        rows = chunk.tensor.contiguous()
        self._send(
            request=request,
            layer=layer,
            hook=hook,
            positions=chunk.metadata["positions"],
            dtype=str(rows.dtype).removeprefix("torch."),
            shape=list(rows.shape),
            data=base64.b64encode(rows.view(torch.uint8).numpy()).decode(),
        )

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """Send that a stream is complete, and how many of its rows are valid."""
        request, layer, hook = finalize.key
        count = finalize.sidecar["num_rows"]
        name = finalize.sidecar["client_request_id"]
        self._send(request=request, name=name, layer=layer, hook=hook, num_rows=count)
        self._results[finalize.key] = CaptureResult(finalize.key, "ok", payload=[count])

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """The result of a stream, once it is complete."""
        return self._results.pop(key, None)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Close the file or the connection."""
        if self._file is not None:
            self._file.close()

    def _send(self, **line: Any) -> None:
        if self._file is None:
            self._file = connect(self._to)
        try:
            data = memoryview(json.dumps(line).encode() + b"\n")
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file = None  # the next line connects again
            raise


def read_rows(lines: Iterable[bytes | str]) -> dict[CaptureKey, torch.Tensor]:
    """The rows of every complete stream, by `(request id, layer, hook)`."""
    parts: dict[Any, list[torch.Tensor]] = {}
    rows: dict[CaptureKey, torch.Tensor] = {}
    for line in map(json.loads, lines):
        key = (line["request"], line["layer"], line["hook"])
        if "data" in line:
            data = bytearray(base64.b64decode(line["data"]))
            flat = torch.frombuffer(data, dtype=getattr(torch, line["dtype"]))
            parts.setdefault(key, []).append(flat.view(line["shape"]))
        elif key in parts:
            rows[key] = torch.cat(parts.pop(key))[: line["num_rows"]]
    return rows


if __name__ == "__main__":
    # Print rows as they arrive: python row_stream.py 9000
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
        for text in server.accept()[0].makefile("r"):
            shown = json.loads(text)
            shown.pop("data", None)
            print(shown)
