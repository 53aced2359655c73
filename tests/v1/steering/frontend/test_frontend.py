# SPDX-License-Identifier: Apache-2.0
"""A front end's modules, and errors of changes that were not made."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import ParallelConfig
from vllm.config.readouts import ReadoutConfig
from vllm.config.steering import SteeringConfig
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.residual.model_identity import ModelIdentity
from vllm.v1.steering.errors import (
    SteeringChangeError,
    SteeringValidationError,
    as_refused,
    fail,
)
from vllm.v1.steering.frontend import frontend as frontend_module
from vllm.v1.steering.frontend.frontend import SteeringFrontend
from vllm.v1.steering.spec.named import NONE_NAMED

CHANGED = SteeringChangeError("no rank has changed its steering: no memory")
REFUSED = fail("vectors: too much. Use smaller ones", "vectors", 1e39)


def remote(error: Exception) -> Exception:
    """The error as it arrives from another process."""
    return Exception(f"Call to set_steering method failed: {error}")


@pytest.mark.parametrize("over", [lambda error: error, remote])
def test_both_kinds_of_errors_are_distinguished_in_any_process(over: object) -> None:
    assert callable(over)
    refused, changed = as_refused(over(REFUSED)), as_refused(over(CHANGED))
    assert isinstance(refused, SteeringValidationError)
    assert isinstance(refused, ValueError)
    assert refused.parameter == "vectors"
    assert str(refused).startswith("vectors: too much. Use smaller ones (parameter=")
    assert str(refused).count("parameter=") == 1
    assert isinstance(changed, SteeringChangeError)
    assert str(changed) == str(CHANGED)


@pytest.mark.parametrize("error", [EngineDeadError(), TimeoutError("no answer")])
def test_other_errors_are_what_they_are(error: Exception) -> None:
    assert as_refused(error) is error


@pytest.mark.parametrize(
    ("name", "vector", "wrong"),
    [("wide", [1.0, 2.0, 3.0], "has 2 numbers"), (" ", [1.0, 2.0], "printable text")],
)
def test_of_several_modules_a_wrong_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, vector: Any, wrong: str
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"vectors": {"pre_attn": {"0": [1.0, 2.0]}}}))
    bad.write_text(json.dumps({"vectors": {"pre_attn": {"0": vector}}}))
    config: Any = SimpleNamespace(
        capture_config=SimpleNamespace(
            hook_points={0: ("pre_attn",)}, point_shapes={}, missing={}
        ),
        model_config=SimpleNamespace(
            get_hidden_size=lambda: 2,
            dtype=torch.float32,
            max_model_len=64,
            is_encoder_decoder=False,
            get_total_num_hidden_layers=lambda: 1,
        ),
        parallel_config=ParallelConfig(),
        readout_config=ReadoutConfig(),
        num_speculative_tokens=0,
        steering_config=SteeringConfig(modules={"fine": str(good), name: str(bad)}),
    )
    text: Any = SimpleNamespace(architectures=None, model_type="", num_hidden_layers=1)
    text.hidden_size, text.get_text_config = 2, lambda: text
    identity = ModelIdentity("tiny", text)
    monkeypatch.setattr(frontend_module, "identity_of", lambda config: identity)
    with pytest.raises(SteeringValidationError, match=wrong) as refused:
        SteeringFrontend(config, NONE_NAMED)
    assert str(refused.value).startswith(f"--steering-modules {name}={bad}: ")
