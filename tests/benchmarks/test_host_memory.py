# SPDX-License-Identifier: Apache-2.0
"""The consumer of the benchmarks, and how engines find it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.harness.host_memory import NAME, HostMemory, plug_in
from vllm.v1.capture.registry import build_consumer, consumer_names
from vllm.v1.capture.types import CaptureChunk, CaptureFinalize

KEY: Any = ("request", 3, "post_block")


def chunk(rows: int, offset: int) -> CaptureChunk:
    return CaptureChunk(KEY, torch.zeros(rows, 4), torch.float32, offset, 0)


def test_it_holds_rows_until_the_end() -> None:
    sink = HostMemory(None, {})
    sink.submit_chunk_batch([chunk(5, 0), chunk(2, 5)])
    assert sum(len(rows) for rows in sink._rows[KEY]) == 7
    assert sink.get_result(KEY) is None
    sink.submit_finalize(CaptureFinalize(KEY))
    result = sink.get_result(KEY)
    assert result is not None and result.payload == [7] and not sink._rows
    assert sink.get_result(KEY) is None


def test_engines_find_it_without_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in plug_in(tmp_path / "plugin").split(":"):
        monkeypatch.syspath_prepend(folder)
    assert NAME in consumer_names()
    entry: Any = SimpleNamespace(name=NAME, instance_name=NAME, params={})
    assert isinstance(build_consumer(entry, None), HostMemory)  # type: ignore[arg-type]
