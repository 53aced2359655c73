# SPDX-License-Identifier: Apache-2.0
"""An error of a feature in a step is that of the requests that use it.

Each place at which the engine's thread calls a feature raises once. The engine goes on,
requests without the feature get what they get without the error, and those with it an
error, never an answer that lacks what was asked for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.models import llama
from tests.v1.readouts._reading import draw, write_modules
from vllm import RequestOutput, SamplingParams
from vllm.v1.capture.dispatch.dispatcher import Dispatcher
from vllm.v1.capture.staging.ring import Staging
from vllm.v1.capture.staging.slot_mapping import SlotMapping
from vllm.v1.capture.worker.worker import WorkerCapture
from vllm.v1.readouts.core import scheduler
from vllm.v1.readouts.frontend import collector
from vllm.v1.readouts.worker import operations, worker
from vllm.v1.readouts.worker.head import Head
from vllm.v1.readouts.worker.pending import PendingReadouts
from vllm.v1.residual.step_layout import StepLayout
from vllm.v1.steering.worker.doses import PendingDoses, StepDoses
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.held_gates import HeldGates
from vllm.v1.steering.worker.tables import SteeringTables, TokenRows
from vllm.v1.steering.worker.worker import WorkerSteering

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 6
PROMPTS = [prompt(11, 1), prompt(7, 2), prompt(40, 3), prompt(5, 4)]
USUAL: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
READOUTS: dict[str, Any] = {
    "probe": {"kind": "probe", "probe": "direction", "positions": "all"},
    "own": {"kind": "probe", "vectors": draw(2, 64).tolist(), "layer": 2},
    "lens": {"kind": "lens", "top_k": 2},
    "sae": {"kind": "sae", "sae": "jump", "top_k": 4},
    "norm": {"kind": "norm", "hooks": {"post_block": "all"}},
    "mean": {
        "kind": "rows",
        "hooks": {"post_block": "all"},
        "reduce": "mean",
        "positions": "all",
    },
}
PROBE = draw(64, seed=3).tolist()


def steered(name: str) -> SamplingParams:
    """With a condition that holds from a token on, and a receipt."""
    when = {
        "probe": PROBE,
        "layer": 0,
        "hook": "post_block",
        "above": -1e3,
        "scope": "rest",
    }
    entry = {"vector": draw(64, seed=sum(name.encode())).tolist(), "when": when}
    vectors = {"post_block": {1: entry}}
    return SamplingParams(
        decode_steering_vectors=vectors, steering_receipt=True, **USUAL
    )


FEATURES = {
    "read": SamplingParams(readouts=READOUTS, **USUAL),
    "steered": steered("usual"),
    "captured": asking(max_tokens=TOKENS, capture_wait=True),
    "plain": SamplingParams(**USUAL),
}
PLACES: dict[str, tuple[Any, str, str]] = {
    "probe": (operations, "probe_values", "read"),
    "probes of requests": (operations, "probe_values", "read"),
    "lens": (Head, "lens_values", "read"),
    "SAE": (operations, "sae_values", "read"),
    "norms": (operations, "norms", "read"),
    "sums": (worker, "reduce_rows", "read"),
    "jobs": (worker, "make_job_set", "read"),
    "results on the host": (worker, "_to_host", "read"),
    "results of a step": (PendingReadouts, "collect", "read"),
    "results in the scheduler": (scheduler._State, "counting", "read"),
    "results of a request": (collector, "_joined", "read"),
    "beginning of readouts": (worker.WorkerReadouts, "add_request", "read"),
    "steering's plan": (WorkerSteering, "plan_step", "steered"),
    "steering's rows": (TokenRows, "write", "steered"),
    "steering's end": (WorkerSteering, "end_step", "steered"),
    "steering's tables": (SteeringTables, "load", "steered"),
    "gates": (HeldGates, "save", "steered"),
    "doses": (StepDoses, "end", "steered"),
    "receipts": (PendingDoses, "collect", "steered"),
    "fired": (FiredCounts, "collect", ""),
    "capture's plan": (StepLayout, "place", "captured"),
    "capture's beginning": (WorkerCapture, "_open", "captured"),
    "slots": (SlotMapping, "write", "captured"),
    "reserving": (Dispatcher, "reserve", "captured"),
    "sending": (Dispatcher, "add", "captured"),
    "copies": (Staging, "to_host", "captured"),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CapturedEngine]:
    folder: Path = tmp_path_factory.mktemp("model")
    modules = write_modules(tmp_path_factory.mktemp("modules"))
    opened = CapturedEngine(
        llama(folder),
        max_num_batched_tokens=24,
        enable_prefix_caching=True,
        enable_steering=True,
        capture_consumers=["inline"],
        **modules.options,
    )
    yield opened
    opened.close()


def batch(engine: CapturedEngine, fresh: str = "") -> dict[str, RequestOutput]:
    """One request with each feature, and one with none.

    With `fresh` the steered one has a vector that is not loaded yet.
    """
    params = dict(FEATURES)
    if fresh:
        params["steered"] = steered(fresh)
    outputs = engine.run(PROMPTS, list(params.values()))
    return dict(zip(FEATURES, outputs, strict=True))


def errors_of(output: RequestOutput) -> list[str]:
    """All errors that a request reports."""
    (sample,) = output.outputs
    found = [one.error for one in (output.readouts or {}).values()]
    found += [one.error for one in (output.capture_results or {}).values()]
    if sample.finish_reason == "error":
        found.append(str(sample.stop_reason))
    return [one for one in found if one]


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("place", PLACES)
def test_an_error_is_that_of_the_requests_with_the_feature(
    engine: CapturedEngine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    before = batch(engine)
    assert not any(map(errors_of, before.values()))
    owner, name, feature = PLACES[place]
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if name == "load" and not args[2]:  # It empties a slot that nobody uses.
            return original(*args, **kwargs)
        calls += 1
        if calls == 1:
            raise ValueError("injected \ud800")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    during = batch(engine, place if feature == "steered" else "")
    assert calls, "the place was not reached"
    for kind, output in during.items():
        if kind != feature:
            assert tokens(output) == tokens(before[kind]), kind
    told = errors_of(during[feature]) if feature else []
    assert bool(told) == bool(feature), told
    if feature == "steered":
        assert during[feature].outputs[0].finish_reason == "error"
    elif feature:
        assert tokens(during[feature]) == tokens(before[feature])
    monkeypatch.undo()
    after = batch(engine)
    assert not any(map(errors_of, after.values()))
    assert {kind: tokens(one) for kind, one in after.items()} == {
        kind: tokens(one) for kind, one in before.items()
    }
