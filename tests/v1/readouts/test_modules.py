# SPDX-License-Identifier: Apache-2.0
"""Files of probes and translators say what they are, and for which model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.v1.residual.sae import _layouts
from vllm.v1.readouts.engine_args import described_file
from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.readouts.modules import (
    FORMAT,
    ProbeModule,
    check_model,
    check_place,
    describe_module,
    load_module,
    save_probe,
)
from vllm.v1.readouts.worker.operations import probe_values
from vllm.v1.residual.frontend.named_files import named_files
from vllm.v1.residual.model_identity import ModelIdentity
from vllm.v1.residual.module_info import KnownModules, ModuleInfo
from vllm.v1.steering.errors import SteeringValidationError

HOOK = "post_block"


def served(weights: str = "") -> ModelIdentity:
    config: Any = SimpleNamespace(architectures=["L"], model_type="l")
    config.get_text_config = lambda: config
    return ModelIdentity("/models/tiny", config, ["alias"], lambda: weights)


def info(model: str, weights: str = "", kind: Any = "probe") -> ModuleInfo:
    return ModuleInfo(
        name="mood",
        kind=kind,
        path="mood",
        width=4,
        size=1,
        model=model,
        weights=weights,
    )


def test_a_file_for_another_model_is_refused() -> None:
    check_model(info(""), served())
    check_model(info("tiny"), served())
    check_model(info("alias"), served("abc"))
    check_model(info("elsewhere/named", "abc"), served("abc"))
    check_model(info("org/other", kind="sae"), served())
    for other, here in (
        (info("org/other"), served()),
        (info("org/other", "abc"), served()),
        (info("tiny", "abc"), served("def")),
        (info("org/other", kind="translator"), served()),
    ):
        with pytest.raises(ReadoutValidationError, match="made for the model") as found:
            check_model(other, here)
        assert "mood" in str(found.value) and "metadata" in str(found.value)


def model_config(width: int) -> Any:
    return SimpleNamespace(
        model="m",
        served_model_name="m",
        revision=None,
        hf_config=LlamaConfig(hidden_size=width, num_attention_heads=1),
        get_hidden_size=lambda: width,
        is_encoder_decoder=False,
        get_total_num_hidden_layers=lambda: 3,
    )


PROBE = {"vectors": torch.ones(2, 4)}
FILES: tuple[tuple[dict[str, torch.Tensor], dict[str, str], str], ...] = (
    (PROBE, {"layer": "1", "hook": "resid_mid"}, ""),
    (PROBE, {"layer": "-1"}, "layer '-1' has no meaning"),
    (PROBE, {"layer": "1", "hook": "middle"}, "hook 'middle' has no meaning"),
    (PROBE, {"hook": "post_block"}, "needs a layer"),
    (PROBE, {"layer": "3"}, "post_block of layer 3, which is not"),
    (PROBE, {"format": "clearbox-steering-v1"}, "does not say format="),
    (PROBE, {"cosine": "yes"}, "cosine 'yes' has no meaning"),
    ({"vectors": torch.zeros(2, 4)}, {"cosine": "true"}, "no direction"),
    (PROBE | {"bais": torch.ones(2)}, {}, "'bais' is none of"),
    ({"vectors": torch.ones(5000, 4)}, {}, "at most 4096"),
    (PROBE | {"threshold": torch.ones(2)}, {"activation": "relu"}, "another with them"),
    (PROBE, {"activation": "jumprelu"}, "without thresholds"),
    ({"2.weight": torch.eye(4)}, {"kind": "translator"}, ""),
    ({"3.weight": torch.eye(4)}, {"kind": "translator"}, r"maps for the layers \[3\]"),
    ({"2.weight": torch.eye(4)}, {"kind": "translator", "residual": "1"}, "residual"),
)


BROKEN: dict[str, tuple[dict[str, torch.Tensor], dict[str, str], str]] = {
    "eight bits": ({"vectors": torch.ones(2, 4).to(torch.float8_e4m3fn)}, {}, "float8"),
    "integers": ({"2.weight": torch.eye(4).int()}, {"kind": "translator"}, "int32"),
    "a number": ({"2.weight": torch.tensor(1.0)}, {"kind": "translator"}, "square"),
    "three sides": (
        {"2.weight": torch.ones(4, 4, 4)},
        {"kind": "translator"},
        "square",
    ),
    "no map": ({"2.bias": torch.ones(4)}, {"kind": "translator"}, "square"),
    "a layer of many digits": (
        {f"{'9' * 5000}.weight": torch.eye(4)},
        {"kind": "translator"},
        "not named LAYER.weight",
    ),
    "a layer of another script": (
        {"\u00b2.weight": torch.eye(4)},
        {"kind": "translator"},
        "not named LAYER.weight",
    ),
}
FILES += tuple(BROKEN.values())


@pytest.mark.parametrize(("tensors", "said", "wrong"), FILES)
def test_a_file_that_is_not_what_it_says_is_refused(
    tmp_path: Path, tensors: Any, said: dict[str, str], wrong: str
) -> None:
    path = str(tmp_path / "mood.safetensors")
    save_file(tensors, path, {"format": FORMAT, "kind": "probe"} | said)
    if not wrong:
        told = described_file("mood", path, model_config(4))
        assert told["tap"] in (None, (1, "post_attn"))
        return
    with pytest.raises(ReadoutValidationError, match=wrong) as refused:
        described_file("mood", path, model_config(4))
    assert str(refused.value).startswith("mood: ") and refused.value.parameter == "path"


def test_a_module_is_for_hook_points_that_the_loaded_model_has() -> None:
    points = {0: ("pre_attn", "post_block"), 1: ("pre_attn",)}
    check_place(replace(info(""), tap=(0, "post_block")), points)
    for tap, said in (
        ((1, "post_block"), "layers 0 to 1"),
        ((0, "mlp_in"), "--hook-points mlp_in"),
    ):
        with pytest.raises(ReadoutValidationError, match=said):
            check_place(replace(info(""), tap=tap), points)


def test_a_probes_file_that_has_changed_is_not_steered_by(tmp_path: Path) -> None:
    path = tmp_path / "mood.safetensors"
    save_probe(path, torch.ones(1, 4), layer=0)
    told = described_file("mood", str(path), model_config(4))
    known = KnownModules({"mood": told})
    assert named_files(known).probe("mood", "when").tap == (0, HOOK)
    save_probe(path, torch.ones(1, 4) * 2, layer=0)
    with pytest.raises(SteeringValidationError, match="has changed since"):
        named_files(known).probe("mood", "when")


@pytest.mark.parametrize("make", [np.array, torch.tensor, list])
def test_a_probe_of_any_library_is_saved(tmp_path: Path, make: Any) -> None:
    for vectors, bias in ((make([1.0, 2.0]), 0.5), (make([[1.0, 2.0]]), make([0.5]))):
        save_probe(tmp_path / "p.safetensors", vectors, bias, layer=1)
        probe = load_module("p", str(tmp_path / "p.safetensors"))
        assert isinstance(probe, ProbeModule)
        assert probe.vectors.tolist() == [[1, 2]] and probe.bias.tolist() == [0.5]


def test_a_value_jumps_in_a_probe_as_in_a_low_rank_entry() -> None:
    given = torch.tensor([[-2.0], [-0.5], [0.5], [2.0]])
    probe = ProbeModule(
        vectors=torch.ones(1, 1),
        bias=torch.zeros(1),
        threshold=torch.tensor([-1.0]),
        activation="jumprelu",
    )
    assert probe_values(probe, given)["values"].flatten().tolist() == [0, -0.5, 0.5, 2]


@pytest.mark.parametrize("kind", ["sae", "probe"])
def test_a_file_for_another_width_is_refused_before_the_model_is_loaded(
    tmp_path: Path, kind: str
) -> None:
    config = model_config(8)
    if kind == "sae":
        path = _layouts.goodfire(tmp_path / "sae", _layouts.parts())
    else:
        path = tmp_path / "mood.safetensors"
        save_probe(path, torch.ones(1, _layouts.D_IN), layer=0)
    with pytest.raises(ReadoutValidationError, match=f"width {_layouts.D_IN}.* 8;"):
        described_file("mood", str(path), config)
    with pytest.raises(ReadoutValidationError, match="give it as"):
        wanted = "module" if kind == "sae" else "sae"
        described_file("mood", str(path), config, wanted)


SETTINGS: dict[str, str] = {
    "a list of norms": '{"normalize_activations": [1]}',
    "an object as k": '{"architecture": "topk", "k": {}}',
    "k without end": '{"architecture": "topk", "k": 1e400}',
    "k that is no number": '{"architecture": "topk", "k": NaN}',
    "an endless layer": '{"hook_name": "blocks.' + "9" * 5000 + '.hook_resid_post"}',
    "deep": '{"a":' * 100_000 + "1" + "}" * 100_000,
}
SHAPES: dict[str, dict[str, torch.Tensor]] = {
    "a number": {"W_enc": torch.tensor(1.0)},
    "other widths": {"b_dec": torch.ones(7)},
    "other features": {"b_enc": torch.ones(9)},
    "three sides": {"W_dec": torch.ones(2, 6, 4)},
    "eight bits": {"W_enc": torch.ones(4, 6).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("case", [*SETTINGS, *SHAPES])
def test_a_malformed_sae_is_the_callers_mistake(tmp_path: Path, case: str) -> None:
    tensors = {"W_enc": torch.ones(4, 6), "W_dec": torch.ones(6, 4)}
    tensors |= {"b_enc": torch.zeros(6), "b_dec": torch.zeros(4)}
    (tmp_path / "cfg.json").write_text(SETTINGS.get(case, "{}"))
    save_file(tensors | SHAPES.get(case, {}), tmp_path / "sae_weights.safetensors")
    if case == "an endless layer":
        assert describe_module("s", "", load_module("s", str(tmp_path))).tap is None
        return
    with pytest.raises(ReadoutValidationError, match=r"^s: ") as refused:
        described_file("s", str(tmp_path), model_config(4))
    assert refused.value.parameter == "path"


def test_facts_after_the_path_of_a_probe_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "mood.safetensors")
    save_file(PROBE, path, {"format": FORMAT, "kind": "probe"})
    with pytest.raises(ReadoutValidationError, match="is for SAEs"):
        load_module("mood", f"{path}?layer=1&hook=post_block")
