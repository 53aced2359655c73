# SPDX-License-Identifier: Apache-2.0
"""Consumers that run within the step see its rows, and steer from the next one on."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.captured import CapturedEngine, prompt
from tests.support.models import llama
from tests.support.plugins import install
from vllm import RequestOutput, SamplingParams
from vllm.v1.worker.steering_action_queue import (
    RequestSteeringOverride,
    SteeringMonitorUpdate,
    SteeringScaleUpdate,
    SteeringVectorUpdate,
    get_steering_action_queue,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TAP = (1, "post_block")
VECTOR = np.random.default_rng(3).normal(size=64).astype(np.float32) * 3
PROMPT = prompt(9, 5)

SOURCE = """
from dataclasses import replace

from vllm.v1.capture import CaptureSpec, SteeringController
from vllm.v1.capture.consumer import CaptureConsumer, SyncCaptureConsumer
from vllm.v1.worker.steering_action_queue import (
    RequestSteeringOverride,
    SteeringVectorUpdate,
    get_steering_action_queue,
)

SEEN, ACTIONS, VECTORS = [], [], {}


class Watcher(SyncCaptureConsumer):
    def global_capture_spec(self):
        return CaptureSpec(hooks={"post_block": [1], "pre_attn": [0]}, positions="all")

    def on_step(self, view):
        for one in view.requests:
            rows = view.tensors[1, "post_block"][one.start : one.end].clone()
            SEEN.append((one, rows))
        found, ACTIONS[:] = list(ACTIONS), []
        if "override" in found:
            found.remove("override")
            req_id = view.requests[0].req_id
            found = [
                replace(one, req_id=req_id) if one.req_id == "it" else one
                for one in found
            ]
            found.insert(0, RequestSteeringOverride(req_id, VECTORS))
        if "raise" in found:
            raise RuntimeError("it is meant to")
        if "leave" in found:
            raise SystemExit(3)
        return 5 if "return 5" in found else found


class Latch(SteeringController):
    def global_capture_spec(self):
        return CaptureSpec(hooks={"post_block": [1]}, positions="all")

    def decide(self, request_view, residual):
        assert residual.shape == (1, 64)
        return RequestSteeringOverride(request_view.req_id, VECTORS, source="latch")


class Plain:
    location = "worker"
    execution = "sync"

    def __init__(self, vllm_config, params):
        self.hook, self.steps = params["hook"], 0

    def global_capture_spec(self):
        return CaptureSpec(hooks={self.hook: [0]}, positions="all_generated")

    def on_step(self, view):
        self.steps += 1

    def status(self):
        return {"own_steps": self.steps}


class Later(CaptureConsumer):
    location = "worker"

    def global_capture_spec(self):
        return CaptureSpec(hooks={"post_block": [1]}, positions="all_generated")

    def on_capture(self, key, tensor, sidecar):
        queue = get_steering_action_queue()
        return queue is not None and queue.submit(SteeringVectorUpdate(VECTORS))
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("plugin")
    names = ("Watcher", "Latch", "Plain", "Later")
    classes = {name.lower(): f"step_plugin:{name}" for name in names}
    install(folder, "step_plugin", SOURCE, **classes)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("step_plugin")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def engine(
    plugin: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CapturedEngine]:
    plugin.VECTORS["post_block"] = {1: VECTOR}
    opened = CapturedEngine(
        llama(tmp_path_factory.mktemp("llama")),
        capture_consumers=["watcher", "latch", "plain:hook=pre_attn"],
        enable_steering=True,
        max_num_batched_tokens=64,
        max_dynamic_steering_configs=2,
    )
    yield opened
    opened.close()


def run(
    engine: CapturedEngine, *asked: dict[str, Any], tokens: int = 6
) -> list[RequestOutput]:
    params = [
        SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=tokens, logprobs=3, **one
        )
        for one in asked
    ]
    return engine.run([PROMPT] * len(params), params)


def logprobs(output: RequestOutput) -> torch.Tensor:
    rows = output.outputs[0].logprobs
    assert rows is not None
    best = [sorted(one.logprob for one in row.values())[-3:] for row in rows]
    return torch.tensor(best)


def same(found: RequestOutput, expected: RequestOutput) -> None:
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def steered_from(position: int) -> dict[str, Any]:
    entry = {"vector": VECTOR, "positions": list(range(position, len(PROMPT) + 5))}
    return {"decode_steering_vectors": {"post_block": {1: entry}}}


def status(engine: CapturedEngine) -> dict[str, Any]:
    (found,) = engine.llm.llm_engine.engine_core.engine_core.dynamic_steering()
    return found


def test_a_step_shows_the_rows_of_its_requests(
    engine: CapturedEngine, plugin: ModuleType
) -> None:
    plugin.SEEN.clear()
    (output,) = run(engine, {})
    assert output.readouts == {}
    fed = [*PROMPT, *output.outputs[0].token_ids][:-1]
    views = [view for view, _ in plugin.SEEN]
    assert [view.phase for view in views] == ["prefill"] + ["decode"] * 5
    assert views[0].token_ids.tolist() == PROMPT and views[1].token_ids.tolist() == [-1]
    rows = torch.cat([rows for _, rows in plugin.SEEN])
    expected = engine.reference.stream(fed)[TAP]
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4)
    assert status(engine)["sync_consumers"]["watcher"]["steps"] >= 6


def test_a_controller_steers_its_conversation_from_its_decision_on(
    engine: CapturedEngine,
) -> None:
    plain, late, whole = run(
        engine, {}, steered_from(len(PROMPT) + 1), steered_from(len(PROMPT))
    )
    assert late.outputs[0].token_ids != plain.outputs[0].token_ids
    before = status(engine)["sync_consumers"]["latch"]["triggers"]
    first, other = run(engine, {"conversation_id": "a"}, {})
    same(first, late)
    same(other, plain)
    (second,) = run(engine, {"conversation_id": "a"})
    same(second, whole)
    (again,) = run(engine, {})
    same(again, plain)  # Nothing of it is left in the prefix cache.
    told = status(engine)
    assert told["sync_consumers"]["latch"]["triggers"] == before + 1
    assert told["sync_consumers"]["latch"]["bridges"] >= 1
    assert told["dynamic_pool"] == {"capacity": 2, "in_use": 0, "overrides": []}


def test_actions_for_all_hold_from_the_next_step_on(
    engine: CapturedEngine, plugin: ModuleType
) -> None:
    plain, late, whole = run(
        engine, {}, steered_from(len(PROMPT) + 1), steered_from(len(PROMPT))
    )
    vector = VECTOR.copy()
    plugin.ACTIONS[:] = [SteeringVectorUpdate({"post_block": {1: vector}})]
    (found,) = run(engine, {})  # Its prompt is the step that brings the action.
    same(found, whole)
    assert status(engine)["dynamic_tier"]["hooks"] == {"post_block": [1]}
    vector[:] = 0  # It was copied.
    plugin.ACTIONS[:] = [SteeringScaleUpdate(0.0, tier_gain=True)]
    same(run(engine, {})[0], plain)
    plugin.ACTIONS[:] = [SteeringScaleUpdate(1.0, tier_gain=True)]
    same(run(engine, {})[0], whole)
    queue = get_steering_action_queue()
    assert queue is not None
    assert queue.submit(SteeringVectorUpdate({"post_block": {1: 0 * VECTOR}}))
    same(run(engine, {})[0], plain)
    assert late.outputs[0].token_ids != plain.outputs[0].token_ids


def gated(sharpness: float, threshold: float) -> dict[str, Any]:
    """A request whose own entry has the monitor's condition."""
    when = {
        "probe": VECTOR,
        "layer": 1,
        "hook": "post_block",
        "above": threshold,
        "sharpness": sharpness,
        "scope": "token",
    }
    entry = {"op": "add", "vector": VECTOR, "when": when}
    return {"decode_steering_vectors": {"post_block": {1: [entry]}}}


def test_a_monitor_gates_what_is_added_for_all(
    engine: CapturedEngine, plugin: ModuleType
) -> None:
    plain, whole, half = run(engine, {}, steered_from(len(PROMPT)), gated(0.02, 3.0))
    far = 1e6
    update = SteeringVectorUpdate({"post_block": {1: VECTOR}})
    shut = SteeringMonitorUpdate("post_block", 1, VECTOR, threshold=far)
    plugin.ACTIONS[:] = [update, shut]
    same(run(engine, {})[0], plain)
    told = status(engine)["monitor"]
    assert (told["layer"], told["above"], told["gate_rows"]) == (1, far, False)
    plugin.ACTIONS[:] = [SteeringMonitorUpdate("post_block", 1, VECTOR, threshold=-far)]
    same(run(engine, {})[0], whole)
    plugin.ACTIONS[:] = [SteeringMonitorUpdate("post_block", 1, VECTOR, 3.0, 0.02)]
    same(run(engine, {})[0], half)
    late = SteeringVectorUpdate({"pre_attn": {1: VECTOR}})
    plugin.ACTIONS[:] = [late]  # Its place comes before the monitor's.
    same(run(engine, {})[0], half)
    assert "decides after the vector" in status(engine)["rejections"][-1]
    plugin.ACTIONS[:] = [SteeringMonitorUpdate("post_block", 1, None)]
    same(run(engine, {})[0], whole)
    plugin.ACTIONS[:] = [SteeringVectorUpdate({"post_block": {1: 0 * VECTOR}})]
    same(run(engine, {})[0], plain)
    assert status(engine)["monitor"] is None


def test_a_monitor_gates_one_request_or_all_overrides(
    engine: CapturedEngine, plugin: ModuleType
) -> None:
    plain, whole = run(engine, {}, steered_from(len(PROMPT)))

    def overridden(*more: Any) -> RequestOutput:
        plugin.ACTIONS[:] = ["override", *more]
        (output,) = run(engine, {})
        return output

    same(overridden(), whole)
    shut = SteeringMonitorUpdate("post_block", 1, VECTOR, threshold=1e6)
    same(overridden(replace(shut, req_id="it")), plain)
    same(overridden(shut), whole)  # It gates what is added for all.
    same(overridden(replace(shut, gate_rows=True)), plain)
    own = replace(shut, threshold=-1e6, req_id="it")
    same(overridden(own), whole)
    plugin.ACTIONS[:] = [SteeringMonitorUpdate("post_block", 1, None)]
    same(run(engine, {})[0], plain)


def test_what_cannot_be_done_is_rejected_and_changes_nothing(
    engine: CapturedEngine, plugin: ModuleType
) -> None:
    (plain,) = run(engine, {})
    before = status(engine)["action_queue"]
    bad = [
        RequestSteeringOverride("nobody", {"post_block": {1: VECTOR}}),
        SteeringVectorUpdate({"post_block": {9: VECTOR}}),
        SteeringVectorUpdate({"post_block": {1: VECTOR[:3]}}),
        SteeringVectorUpdate({"post_block": {1: VECTOR}}, phase="prefill"),
        SteeringVectorUpdate(None),
        SteeringVectorUpdate({"post_block": {float("inf"): VECTOR}}),
        SteeringVectorUpdate({"post_block": {10**30: VECTOR}}),
        SteeringVectorUpdate({"\ud800": {1: VECTOR}}),
        SteeringMonitorUpdate("post_block", 1, VECTOR, config_hash=3),
        SteeringMonitorUpdate("post_block", 1, VECTOR, req_id="nobody"),
        SteeringMonitorUpdate("post_block", 1, VECTOR, sharpness=-1.0),
        SteeringMonitorUpdate("post_block", 9, VECTOR),
        "no action",
    ]
    plugin.ACTIONS[:] = bad
    same(run(engine, {})[0], plain)
    after = status(engine)
    rejected = after["action_queue"]["rejected"] - before["rejected"]
    assert rejected == len(bad)
    assert any("no request 'nobody'" in one for one in after["rejections"])
    for misbehaves in ("raise", "leave", "return 5"):
        plugin.ACTIONS[:] = [misbehaves]
        same(run(engine, {})[0], plain)


def test_a_class_without_a_base_runs_within_the_step(engine: CapturedEngine) -> None:
    before = status(engine)["sync_consumers"]["plain"]["own_steps"]
    run(engine, {})
    assert status(engine)["sync_consumers"]["plain"]["own_steps"] == before + 5


def test_a_consumer_on_a_thread_steers_later_requests_if_the_operator_lets_it(
    plugin: ModuleType, tmp_path: Path
) -> None:
    plugin.VECTORS["post_block"] = {1: VECTOR}
    opened = CapturedEngine(
        llama(tmp_path),
        capture_consumers=["later"],
        enable_steering=True,
        max_dynamic_steering_configs=2,
    )
    try:
        plain, steered = run(opened, {}, steered_from(len(PROMPT)))
        assert plain.capture_results is not None
        assert plain.capture_results["later"].payload is True
        (later,) = run(opened, {})
        same(later, steered)
        assert later.outputs[0].token_ids != plain.outputs[0].token_ids
        assert status(opened)["dynamic_tier"]["hooks"] == {"post_block": [1]}
    finally:
        opened.close()
