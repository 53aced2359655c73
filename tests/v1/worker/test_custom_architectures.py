# SPDX-License-Identifier: Apache-2.0
"""Architectures of a plug-in are woven if the analysis succeeds."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import Reference
from tests.support.models import llama
from vllm import LLM, ModelRegistry

pytestmark = pytest.mark.e2e

SOURCE = """
from vllm.model_executor.models.llama import (
    LlamaDecoderLayer, LlamaForCausalLM, LlamaModel,
)


class OwnLayer(LlamaDecoderLayer):
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(
            hidden_states, residual
        )
        return self.mlp(hidden_states), residual


class StrangeLayer(OwnLayer):
    def forward(self, positions, hidden_states, residual):
        for _ in range(1):
            hidden_states, residual = super().forward(
                positions, hidden_states, residual
            )
        return hidden_states, residual


class OwnForCausalLM(LlamaForCausalLM):
    def _init_model(self, vllm_config, prefix="", layer_type=None):
        return LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=OwnLayer)


class StrangeForCausalLM(LlamaForCausalLM):
    def _init_model(self, vllm_config, prefix="", layer_type=None):
        return LlamaModel(
            vllm_config=vllm_config, prefix=prefix, layer_type=StrangeLayer
        )
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Llama checkpoint, and a plug-in with custom architectures."""
    (tmp_path / "own_architectures.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    plugin = importlib.import_module("own_architectures")
    for name in ("OwnForCausalLM", "StrangeForCausalLM"):
        ModelRegistry.register_model(name, getattr(plugin, name))
    yield llama(tmp_path / "model")
    for name in ("OwnForCausalLM", "StrangeForCausalLM"):
        ModelRegistry.models.pop(name)


def of(model: Path, architecture: str) -> Path:
    """The same checkpoint, labelled with another architecture."""
    path = model / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [architecture]}
    path.write_text(json.dumps(config))
    return model


def test_a_plug_in_s_layers_have_hook_points(model: Path) -> None:
    reference = Reference(model)
    engine = CapturedEngine(of(model, "OwnForCausalLM"), reference=reference)
    for output in engine.run([prompt(9), prompt(30, seed=1)], asking()):
        engine.check(output)
    engine.close()


def test_a_plug_in_s_layers_that_are_not_understood_only_lack_the_features(
    model: Path,
) -> None:
    of(model, "StrangeForCausalLM")
    options = {"model": str(model), "enforce_eager": True, "max_model_len": 64}
    with pytest.raises(ValueError) as raised:
        LLM(dtype="float32", enable_steering=True, **options)
    message = str(raised.value)
    assert "the architecture StrangeForCausalLM is refused" in message
    assert "own_architectures.StrangeLayer: a For statement over" in message
    assert "Its hook points are: none" in message
    llm = LLM(dtype="float32", **options)
    (output,) = llm.generate("Once", use_tqdm=False)
    assert output.outputs[0].token_ids
    llm.llm_engine.engine_core.shutdown()
