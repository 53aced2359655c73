# SPDX-License-Identifier: Apache-2.0
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from row_stream import RowStream, read_rows

from vllm.v1.capture.sink import CaptureSink
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    VllmInternalRequestId,
)


def key(request: str = "r", layer: int = 2) -> CaptureKey:
    return (VllmInternalRequestId(request), layer, "post_block")


def chunk(of: CaptureKey, start: int, count: int, dtype: torch.dtype) -> CaptureChunk:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(start))
    positions = list(range(start, start + count))
    return CaptureChunk(
        of, rows.to(dtype), dtype, start, start, {"positions": positions}
    )


def finalize(of: CaptureKey, num_rows: int) -> CaptureFinalize:
    return CaptureFinalize(of, {"num_rows": num_rows, "client_request_id": "mine"})


def sent(sink: RowStream, of: CaptureKey, dtype: torch.dtype) -> torch.Tensor:
    chunks = [chunk(of, 0, 3, dtype), chunk(of, 3, 1, dtype), chunk(of, 4, 1, dtype)]
    for part in chunks:
        sink.submit_chunk(part)
    sink.submit_finalize(finalize(of, 4))
    return torch.cat([part.tensor for part in chunks])[:4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_file_gives_the_rows_back_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    sink = RowStream(None, {"to": str(path)})
    wanted = {of: sent(sink, of, dtype) for of in (key("a"), key("b", 5))}
    sink.shutdown()
    found = read_rows(path.read_bytes().splitlines())
    assert found.keys() == wanted.keys()
    for of, rows in wanted.items():
        assert torch.equal(found[of], rows)
        result = sink.get_result(of)
        assert result is not None and result.status == "ok" and result.payload == [4]


def test_a_socket_gets_rows_before_the_request_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sink = RowStream(None, {"to": f"tcp://127.0.0.1:{port}"})
        sink.submit_chunk(chunk(key(), 0, 2, torch.float32))
        lines = server.accept()[0].makefile("rb")
        first = lines.readline()
        assert b'"positions": [0, 1]' in first
        sink.submit_finalize(finalize(key(), 1))
        sink.shutdown()
        assert read_rows([first, *lines])[key()].shape == (1, 4)


def test_a_line_that_is_lost_fails_its_stream_and_the_next_connects_again() -> None:
    sink: Any = RowStream(None, {"to": "/dev/full"})  # every write fails
    with pytest.raises(OSError):
        sink.submit_chunk(chunk(key(), 0, 1, torch.float32))
    sink._to = "/dev/null"
    sink.submit_chunk(chunk(key("s"), 0, 1, torch.float32))


def test_it_is_a_sink_and_says_what_it_needs() -> None:
    assert isinstance(RowStream(None, {"to": "x"}), CaptureSink)
    with pytest.raises(ValueError, match="to="):
        RowStream(None, {})
