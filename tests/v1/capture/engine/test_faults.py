# SPDX-License-Identifier: Apache-2.0
"""Consumers that raise, in every process; what they keep, and the counters."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.plugins import install
from vllm import SamplingParams

pytestmark = pytest.mark.e2e

PLUGIN = '''
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.types import CaptureResult, CaptureSpec

WRONG = set()


def maybe(method):
    if method in WRONG:
        raise RuntimeError(f"{method} went wrong")


class Spoken(CaptureConsumer):
    """Keeps what a request says, and gives it back as the payload."""

    reads_client_spec = True

    def __init__(self, vllm_config, params):
        self.specs = {}

    def validate_client_spec(self, raw, ctx):
        maybe("validate_client_spec")
        if ctx.vllm_internal_request_id in WRONG:
            raise RuntimeError("this id is not wanted")
        self.specs[ctx.vllm_internal_request_id] = raw["word"]
        return CaptureSpec({"post_block": [1]}, "all")

    def on_capture(self, key, tensor, sidecar):
        maybe("on_capture")
        return [f"{self.specs.pop(key[0])} {len(tensor)}"]

    def on_error(self, key, error):
        maybe("on_error")

    def shutdown(self, timeout=30.0):
        maybe("shutdown")


class Sink:
    """Counts rows; each of its methods may raise."""

    location = "worker"
    reads_client_spec = True

    def __init__(self, vllm_config, params):
        self.rows = {}

    def validate_client_spec(self, raw, ctx):
        return CaptureSpec({"post_block": [0, 1]}, "all")

    def submit_chunk(self, chunk):
        maybe("submit_chunk")
        self.rows[chunk.key] = self.rows.get(chunk.key, 0) + len(chunk.tensor)

    def submit_chunk_batch(self, chunks):
        maybe("submit_chunk_batch")
        for chunk in chunks:
            self.submit_chunk(chunk)

    def submit_finalize(self, finalize):
        maybe("submit_finalize")

    def submit_request_end(self, request_id, finalizes):
        maybe("submit_request_end")

    def get_result(self, key):
        maybe("get_result")
        return CaptureResult(key, "ok", None, [self.rows.pop(key, 0)])

    def shutdown(self, timeout=30.0):
        maybe("shutdown")


class SpokenBeside(Spoken):
    location = "driver"


class SinkBeside(Sink):
    location = "driver"
'''


@pytest.fixture(scope="module")
def troubled(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CapturedEngine]:
    packages = tmp_path_factory.mktemp("packages")
    names = {
        "spoken_worker": "plug_trouble:Spoken",
        "spoken_driver": "plug_trouble:SpokenBeside",
        "sink_worker": "plug_trouble:Sink",
        "sink_driver": "plug_trouble:SinkBeside",
    }
    install(packages, "plug_trouble", PLUGIN, **names)
    sys.path.insert(0, str(packages))
    engine = CapturedEngine(model, capture_consumers=list(names))
    yield engine
    # An exception in every consumer's shutdown must not prevent the engine from
    # stopping.
    importlib.import_module("plug_trouble").WRONG.add("shutdown")
    engine.close()
    sys.path.remove(str(packages))


@pytest.fixture
def wrong(troubled: CapturedEngine) -> Iterator[set[str]]:
    methods: set[str] = importlib.import_module("plug_trouble").WRONG
    yield methods
    methods.clear()


def params(name: str, **more: Any) -> SamplingParams:
    found = asking("all", max_tokens=4, **more)
    assert found.capture is not None
    return SamplingParams(
        max_tokens=4,
        temperature=found.temperature,
        ignore_eos=True,
        n=found.n,
        capture=found.capture | {name: {"word": "hello"}},
    )


WAYS = [
    (f"{kind}_{location}", method)
    for location in ("worker", "driver")
    for kind, methods in (
        ("spoken", ["on_capture"]),
        (
            "sink",
            [
                "submit_chunk",
                "submit_chunk_batch",
                "submit_finalize",
                "submit_request_end",
                "get_result",
            ],
        ),
    )
    for method in methods
]


@pytest.mark.parametrize("name, method", WAYS)
def test_a_consumer_that_raises_spoils_its_own_result_only(
    troubled: CapturedEngine, wrong: set[str], name: str, method: str
) -> None:
    wrong |= {method, "on_error"}
    (output,) = troubled.run([prompt(7, seed=900)], params(name))
    assert len(output.outputs[0].token_ids) == 4
    result = output.capture_results[name]
    assert result.status == "error"
    assert f"RuntimeError: {method} went wrong" in str(result.error)
    assert output.capture_results["keeper"].status == "ok"
    troubled.check(output)
    wrong.clear()
    (after,) = troubled.run([prompt(7, seed=900)], params(name))
    assert after.capture_results[name].status == "ok"


@pytest.mark.parametrize("name", ["spoken_worker", "spoken_driver"])
def test_a_validation_that_raises_refuses_the_request(
    troubled: CapturedEngine, wrong: set[str], name: str
) -> None:
    wrong.add("validate_client_spec")
    with pytest.raises(ValueError, match=f"capture.{name}: .*went wrong"):
        troubled.run([prompt(7)], params(name))
    assert in_flight(troubled) == 0


@pytest.mark.parametrize("name", ["spoken_worker", "spoken_driver"])
def test_what_a_consumer_keeps_of_a_spec_is_there_with_the_rows(
    troubled: CapturedEngine, name: str
) -> None:
    (output,) = troubled.run([prompt(7)], params(name))
    assert output.capture_results[name].payload == ["hello 10"]


@pytest.mark.parametrize("name", ["spoken_worker", "spoken_driver"])
def test_what_a_consumer_keeps_is_there_for_every_sample(
    troubled: CapturedEngine, name: str
) -> None:
    (output,) = troubled.run([prompt(7)], params(name, n=2, temperature=1.0))
    assert output.capture_results[name].payload == {0: ["hello 10"], 1: ["hello 10"]}


def counters(engine: CapturedEngine) -> dict[str, Any]:
    found: dict[str, Any] = engine.llm.llm_engine.capture.describe()["counters"]  # type: ignore[attr-defined]
    return found


def in_flight(engine: CapturedEngine) -> int:
    return int(counters(engine)["requests_in_flight"])


def growth(engine: CapturedEngine, run: Callable[[], Any]) -> Any:
    """The change of the counters, once the worker has reported it."""
    sleep(1.2)
    before = counters(engine)
    run()
    deadline = monotonic() + 10
    while counters(engine) == before and monotonic() < deadline:
        sleep(0.05)
    sleep(1.2)
    after = counters(engine)
    grown = {
        name: {
            field: value - before["consumers"][name][field]
            for field, value in c.items()
        }
        for name, c in after["consumers"].items()
    }
    return grown, after["reforwarded_tokens"] - before["reforwarded_tokens"]


def test_rows_bytes_and_failures_are_counted(
    troubled: CapturedEngine, wrong: set[str]
) -> None:
    troubled.run([prompt(5, seed=901)], params("sink_worker"))  # counters exist

    def run() -> None:
        troubled.run([prompt(7, seed=902)], params("sink_worker"))
        wrong.add("on_capture")
        troubled.run([prompt(7, seed=903)], params("spoken_driver"))

    grown, _ = growth(troubled, run)
    sink, keeper, spoken = (
        grown[name] for name in ("sink_worker", "keeper", "spoken_driver")
    )
    assert (sink["rows"], sink["bytes"], sink["requests"]) == (20, 20 * 64 * 4, 1)
    assert (keeper["rows"], keeper["requests"], keeper["failed_rows"]) == (180, 2, 0)
    assert (spoken["rows"], spoken["failed_rows"]) == (10, 10)
    levels = ("queue_depth", "queue_bytes", "spill_bytes")
    assert all(each[level] == 0 for each in grown.values() for level in levels)


@pytest.mark.parametrize(
    "positions, again", [("all", 96), ([70], 32), ("last_prompt", 0)]
)
def test_tokens_that_a_capture_computes_again_are_counted(
    troubled: CapturedEngine, positions: Any, again: int
) -> None:
    seed = 910 + again
    asked = asking(positions, max_tokens=2)
    troubled.run([prompt(100, seed)], asked)
    _, reforwarded = growth(troubled, lambda: troubled.run([prompt(100, seed)], asked))
    assert reforwarded == again
