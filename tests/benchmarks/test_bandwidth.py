# SPDX-License-Identifier: Apache-2.0
"""The bandwidth benchmark: its consumer, its stages on a CPU, its arithmetic."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.bandwidth import evaluated
from benchmarks.harness import stages
from benchmarks.harness.charts import chart_of
from benchmarks.harness.host_memory import NAME, HostMemory, plug_in
from benchmarks.harness.llamas import MODELS
from benchmarks.harness.reports import engine_facts, summary
from vllm.v1.capture.registry import build_consumer, consumer_names
from vllm.v1.capture.types import CaptureChunk, CaptureFinalize

KEY: Any = ("request", 3, "post_block")


@pytest.fixture
def plugged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in plug_in(tmp_path / "plugin").split(":"):
        monkeypatch.syspath_prepend(folder)


def chunk(rows: int, offset: int) -> CaptureChunk:
    return CaptureChunk(KEY, torch.zeros(rows, 4), torch.float32, offset, 0)


def held(sink: HostMemory) -> int:
    return sum(len(tensor) for kept in sink._rows.values() for tensor in kept)


@pytest.mark.parametrize(("params", "kept"), [({}, 7), ({"keep": False}, 0)])
def test_the_consumer_holds_rows_until_the_end_by_default(
    params: dict[str, Any], kept: int
) -> None:
    sink = HostMemory(None, params)
    sink.submit_chunk_batch([chunk(5, 0), chunk(2, 5)])
    assert held(sink) == kept and sink.get_result(KEY) is None
    sink.submit_finalize(CaptureFinalize(KEY))
    result = sink.get_result(KEY)
    assert result is not None and result.payload == [7] and held(sink) == 0
    assert sink.get_result(KEY) is None


@pytest.mark.usefixtures("plugged_in")
def test_engines_find_the_consumer_without_an_installation() -> None:
    assert NAME in consumer_names()
    entry: Any = SimpleNamespace(name=NAME, instance_name=NAME, params={})
    assert isinstance(build_consumer(entry, None), HostMemory)  # type: ignore[arg-type]


@pytest.mark.usefixtures("plugged_in")
def test_every_row_passes_the_stages_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SAMPLE_BYTES", 1 << 20)
    found = stages.measure(layers=2, width=64, prompt=40, device="cpu", rounds=2)
    assert found.keys() == {
        "pinned host to consumer, prompts",
        "pinned host to consumer, decoded tokens",
    }
    assert all(len(speeds) == 2 and min(speeds) > 0 for speeds in found.values())


def test_ratios_are_of_throughputs_in_the_same_round() -> None:
    settings = {"model": "tiny", "prompts": 2, "prompt_len": 10}
    rounds = [
        {"upstream": [1.0, 3.0], "plain": [2.0, 2.0], "captured": [4.0, 4.0]},
        {"upstream": [8.0, 8.0], "plain": [8.0, 8.0], "captured": [10.0, 10.0]},
        {"upstream": [9.0, 9.0], "plain": [9.0, 9.0], "captured": [10.0, 10.0]},
    ]
    found = evaluated(rounds, settings)
    ratio = found["ratio"]["captured / upstream"]
    assert (ratio["smallest"], ratio["median"], ratio["largest"]) == (0.5, 0.8, 0.9)
    assert found["ratio"]["plain / upstream"]["median"] == 1
    assert found["tokens_per_second"]["upstream"]["largest"] == 2 * 20 / 4
    size = MODELS["tiny"]
    rows = 20 * size["num_hidden_layers"]
    assert found["rows_per_second"]["largest"] == 2 * rows / 8
    row_bytes = 2 * size["hidden_size"]
    assert found["bytes_per_second"]["largest"] == 2 * rows * row_bytes / 8
    report = {
        **found,
        "command": "python benchmarks/bandwidth.py",
        "stages": {"device to pinned host": summary([2e9, 3e9])},
        "start": {"upstream": {}, "fork": {}},
    }
    throughput, speeds = chart_of(report).panels
    assert [row.goal is not None for row in throughput.rows] == [True, False, False]
    assert speeds.rows[0].marks[0].median == 2.5 and not speeds.is_ratio


def test_an_engines_log_says_what_its_start_took() -> None:
    log = """
    Model loading took 2.3 GiB memory and 1.5 seconds
    Graph capturing finished in 3 secs, took 0.20 GiB
    Graph capturing finished in 7 secs, took 0.31 GiB
    GPU KV cache size: 1,234,567 tokens, 1 group
    """
    assert engine_facts(log) == {
        "graph_seconds": 7,
        "graph_gib": 0.31,
        "weights_gib": 2.3,
        "kv_cache_tokens": 1234567,
    }
