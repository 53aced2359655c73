# SPDX-License-Identifier: Apache-2.0
"""The driver for TransformerLens, without its package."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.streams import streams_of
from vllm import LLM
from vllm.interop.transformer_lens import EngineDriver
from vllm.interop.transformer_lens.interventions import names_of, parsed

TOKENS = torch.tensor([[5, 70, 300, 41, 9, 18], [7, 8, 9, 10, 11, 12]])


@pytest.fixture
def driver(llm: LLM) -> EngineDriver:
    config: Any = SimpleNamespace(n_layers=3, d_model=64)
    return EngineDriver(llm, config, "LlamaForCausalLM")


@pytest.fixture(autouse=True)
def protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one class that the driver takes from the package."""
    name = "transformer_lens.model_bridge.driver_protocol"
    module = ModuleType(name)
    module.ForwardResult = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


SPECS = {
    "blocks.0.hook_out": {"op": "scale", "factor": 0.5, "pos": np.int64(2)},
    "blocks.1.hook_out": {"op": "add", "value": torch.ones(64).bfloat16(), "pos": [-1]},
    "blocks.2.hook_out": {"op": "set", "value": 0.25, "pos": [0, 5]},
}


def change(layer: int, states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    if layer == 0:
        states[:, 2] *= 0.5
    elif layer == 1:
        states[:, -1] += 1.0
    else:
        states[:, [0, 5]] = 0.25
    return states


@pytest.mark.e2e
def test_captures_are_those_after_the_points_own_intervention(
    driver, reference
) -> None:
    capture = tuple(SPECS)
    found = driver.forward(TOKENS, capture=capture, intervene=SPECS)
    logits, streams = streams_of(reference, TOKENS, change)
    for name, expected in zip(capture, streams):
        torch.testing.assert_close(found.captured[name], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.logits, logits, rtol=0, atol=5e-4)


@pytest.mark.e2e
def test_generation_samples_as_it_is_told(driver, reference) -> None:
    sampling = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    made = driver.generate(TOKENS.tolist(), sampling)
    expected = reference.generate(TOKENS, max_new_tokens=4, do_sample=False)
    assert made == expected[:, 6:].tolist()
    steered = driver.generate(
        TOKENS.tolist(), sampling, {"blocks.2.hook_out": {"op": "suppress"}}
    )
    assert steered != made


def test_points_inside_the_block_may_be_there_without_a_name() -> None:
    found = names_of({1: ("pre_attn", "q", "router_logits", "mlp_in")})
    streams = ["blocks.1.hook_in", "blocks.1.hook_resid_pre"]
    assert list(found) == [*streams, "blocks.1.mlp.hook_in"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"op": "flip"}, "use one of"),
        ({"op": ["scale"]}, "use one of"),
        ({"op": "scale"}, "'scale' needs the key 'factor'"),
        ({"op": "add"}, "'add' needs the key 'value'"),
        ({"op": "suppress", "factor": 0.5}, "no key 'factor'; the keys of 'suppress'"),
        ({"op": "add", "value": 1, "factor": 2}, "no key 'factor'"),
        ({"op": "add", "value": 1, "at": 2}, "no key 'at'"),
        ({"op": "scale", "factor": [1.0, 2.0]}, "give a finite number"),
        ({"op": "scale", "factor": float("nan")}, "give a finite number"),
        ({"op": "set", "value": [1.0, 2.0]}, "has 2 elements; the hook point is 4"),
        ({"op": "set", "value": "much"}, "give a number or 4 numbers"),
        ({"op": "set", "value": float("inf")}, "must be finite"),
        ({"op": "suppress", "pos": slice(0, 2)}, "a position or a list"),
        ({"op": "suppress", "pos": [True]}, "a position or a list"),
        ({"op": "suppress", "pos": []}, "a position or a list"),
    ],
    ids=str,
)
def test_an_intervention_that_is_not_one_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parsed("blocks.0.hook_in", spec, 4)
    assert "blocks.0.hook_in" in str(refused.value)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": [[1, 2, 3], [1, 2]]}, "different lengths: pass them one by one"),
        ({"input_ids": None}, "input_ids is missing"),
        ({"capture": ("blocks.9.hook_out",)}, "not a hook point"),
        ({"use_cache": True}, "unknown to this driver"),
        ({"attention_mask": torch.tensor([[0, 1]])}, "padding would be read"),
        (
            {
                "intervene": {
                    "blocks.0.hook_out": {"op": "suppress"},
                    "blocks.0.hook_resid_post": {"op": "add", "value": 1.0},
                }
            },
            "another name of the same hook point",
        ),
    ],
    ids=["lengths", "missing", "capture", "unknown", "mask", "twice"],
)
def test_calls_that_cannot_be_carried_are_refused(
    driver, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        driver.forward(**{"input_ids": TOKENS, **given})
