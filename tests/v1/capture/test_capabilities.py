# SPDX-License-Identifier: Apache-2.0
import ast
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.capture import capabilities
from vllm.v1.capture.capabilities import (
    SinkCapabilities,
    consumer_capabilities,
    row_encoder,
    sink_capabilities,
)

ROOT = Path(__file__).parents[3] / "vllm"
OWNERS = {"capabilities.py", "registry.py"}
"""`registry.py` checks the minimum when it finds a class."""


class Everything:
    reads_client_spec = waits = streams = truncates = batches_steps = True
    max_inflight_bytes, max_call_seconds, folder = 7, 100.0, "/somewhere"

    def validate_client_spec(self, raw: Any, ctx: Any) -> Any: ...
    def global_capture_spec(self) -> str:
        return "all"

    def claimed_places(self, raw: Any, request_id: str, num_samples: int) -> list[str]:
        return [f"{request_id}/{num_samples}"]

    def submit_chunk_batch(self, chunks: Any) -> str:
        return "batch"

    def submit_request_end(self, request_id: Any, finalizes: Any) -> str:
        return "end"

    def when_done(self, request_id: Any, notify: Any) -> str:
        return "done"

    def wait_for_result(self, key: Any, timeout: float) -> Any:
        return "result"


def test_all_capabilities_of_a_consumer_are_read() -> None:
    can = consumer_capabilities(Everything())
    assert can.takes_requests and can.told is not None and can.waits
    assert can.streams
    assert (can.max_inflight_bytes, can.folder) == (7, Path("/somewhere"))
    assert can.global_spec is not None and can.global_spec() == "all"
    assert can.places_of is not None and can.places_of({}, "r", 2) == ["r/2"]


def test_all_capabilities_of_a_sink_are_read() -> None:
    can: Any = sink_capabilities(Everything())
    assert can.truncates and can.batches_steps and can.max_call_seconds == 100
    calls = [can.submit_chunk_batch([]), can.submit_request_end("r", [])]
    calls += [can.when_done("r", None), can.wait_for_result("k", 1.0)]
    assert calls == ["batch", "end", "done", "result"]


@pytest.mark.parametrize("kind", [consumer_capabilities, sink_capabilities])
def test_capabilities_are_off_by_default(kind: Any) -> None:
    can = kind(object())
    assert not any(getattr(can, field.name) for field in fields(can))


@pytest.mark.parametrize(
    ("said", "remembers"),
    [
        ({}, False),
        ({"reads_client_spec": True}, True),
        ({"reads_client_spec": True, "remembers_specs": False}, False),
    ],
)
def test_a_consumer_of_requests_validates_their_specs_by_default(
    said: dict[str, bool], remembers: bool
) -> None:
    consumer = SimpleNamespace(validate_client_spec=print, **said)
    assert (consumer_capabilities(consumer).told is not None) == remembers


def test_consumers_are_asked_in_one_place() -> None:
    optional = {
        node.args[1].value
        for node in probes(Path(capabilities.__file__))
        if isinstance(node.args[1], ast.Constant)
    }
    assert {"truncates", "reads_client_spec"} <= optional
    optional |= {"submit_chunk", *(one.name for one in fields(SinkCapabilities))}
    elsewhere = [
        f"{path.name}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        if path.name not in OWNERS
        for node in probes(path)
        if isinstance(node.args[1], ast.Constant) and node.args[1].value in optional
    ]
    assert not elsewhere


def probes(path: Path) -> list[ast.Call]:
    """The calls of `getattr` and `hasattr` in a file."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
    ]


def test_rows_are_encoded_for_the_only_consumer_of_a_gpu() -> None:
    one: Any = SimpleNamespace(row_encoder=lambda *what: what)
    plain: Any = SimpleNamespace(row_encoder=None)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    facts = 8, torch.bfloat16
    assert row_encoder([one], *facts, gpu) == (*facts, gpu)
    assert row_encoder([one], *facts, cpu) is None
    assert row_encoder([one, plain], *facts, gpu) is None
    assert row_encoder([plain], *facts, gpu) is None
    assert row_encoder([], *facts, gpu) is None
