# SPDX-License-Identifier: Apache-2.0
"""Files of vectors are checked before a model is loaded."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.v1.steering.frontend._arguments import steering_arguments
from vllm.v1.readouts.modules import save_probe
from vllm.v1.residual.frontend import engine_args
from vllm.v1.steering.errors import SteeringValidationError

OUT = {"op": "project_out", "vector": [1.0] * 4}


def model(width: int = 4, layers: int = 3) -> Any:
    return SimpleNamespace(
        model="none",
        served_model_name="none",
        revision=None,
        hf_config=LlamaConfig(hidden_size=width, num_attention_heads=1),
        dtype=torch.float32,
        max_model_len=64,
        get_hidden_size=lambda: width,
        is_encoder_decoder=False,
        get_total_num_hidden_layers=lambda: layers,
    )


def arguments(path: str) -> Any:
    return steering_arguments(steering_modules={"calm": path})


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "capture_config", lambda *_: None)


def steering_config(args: Any, model: Any) -> Any:
    return engine_args.configs(args, model, None)["steering_config"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"vectors": {"post_block": {"2": [1.0] * 4}}}, ""),
        ({"vectors": {"post_block": {"3": [1.0] * 4}}}, "no layer 3"),
        ({"vectors": {"post_block": {"2": [1.0] * 5}}}, "4 numbers"),
        ({"vectors": {"middle": {"2": [1.0] * 4}}}, "middle"),
        ({"vectors": {"post_block": {"2": [1e39] * 4}}}, "finite"),
        ({"vectors": {"blocks.2.attn.hook_k": [1.0] * 3}}, ""),  # Unknown yet.
        ({"vectors": {"z": {"2": {"vector": [1.0], "heads": [0]}}}}, ""),
        ({"vectors": 3}, "vectors"),
        ({"other": {}}, "keys"),
        ({"vectors": {"post_block": {"2": [OUT] * 9}}}, "allows 8"),
        ({"decode_vectors": {"post_block": {"2": OUT | {"positions": [-1]}}}}, "end"),
        ({"vectors": {"post_block": {"2": OUT | {"positions": [64]}}}}, "at 64"),
        ({"vectors": {"post_block": {"2": OUT | {"positions": [-64]}}}}, ""),
    ],
)
def test_what_the_model_could_not_take_stops_the_start(
    tmp_path: Path, body: Any, said: str
) -> None:
    file = tmp_path / "calm.json"
    file.write_text(json.dumps(body))
    if not said:
        assert steering_config(arguments(str(file)), model()).enabled
        return
    with pytest.raises(SteeringValidationError, match=said) as found:
        steering_config(arguments(str(file)), model())
    assert "--steering-modules calm=" in str(found.value)


def test_files_are_checked_against_the_servers_limits(tmp_path: Path) -> None:
    file = tmp_path / "calm.json"
    file.write_text(json.dumps({"vectors": {"post_block": {"2": [OUT] * 9}}}))
    given = arguments(str(file))
    given.max_steering_ops = 9
    assert steering_config(given, model()).max_operations == 9
    given.steering_bank_mib = 0
    with pytest.raises(SteeringValidationError, match="--steering-bank-mib"):
        steering_config(given, model())


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SteeringValidationError, match="there is no file"):
        steering_config(arguments(str(tmp_path / "none.json")), model())


def test_entries_of_files_may_name_the_servers_probes(tmp_path: Path) -> None:
    probe = tmp_path / "mood.safetensors"
    save_probe(probe, torch.ones(1, 4), layer=1)
    condition = {"probe": "mood", "above": 0.5}
    body = {"vectors": {"post_block": {"2": {"vector": [1.0] * 4, "when": condition}}}}
    path = tmp_path / "calm.json"
    path.write_text(json.dumps(body))
    given = arguments(str(path))
    with pytest.raises(SteeringValidationError, match="no probe is named 'mood'"):
        steering_config(given, model())
    given.readout_modules = {"mood": str(probe)}
    assert steering_config(given, model()).modules == {"calm": str(path)}
