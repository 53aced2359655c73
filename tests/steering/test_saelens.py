# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.steering import _foreign
from vllm.steering.saelens import read_saelens
from vllm.v1.steering.errors import SteeringValidationError

DECODER = np.arange(15, dtype=np.float32).reshape(5, 3)
POST = "blocks.8.hook_resid_post"


@pytest.mark.parametrize(
    "config",
    [
        {"hook_name": POST, "hook_layer": 8},
        {"hook_point": POST, "hook_point_layer": 8},
        {"meta": {"hook_name": POST, "model_name": "gpt2-small"}},
        {"metadata": {"hook_name": POST, "model_name": "gpt2-small"}},
        {"metadata": {"hook_name": "blocks.1.hook_mlp_in", "hook_name_out": POST}},
    ],
)
def test_every_releases_configuration_says_the_place(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    found = read_saelens(_foreign.saelens(tmp_path / "sae", DECODER, **config), 2)
    assert list(found.vectors) == [(8, "post_block")]
    assert found.vectors[8, "post_block"].tolist() == DECODER[2].tolist()
    assert "feature 2 of the SAE" in found.provenance.origin


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("hook_resid_pre", "pre_attn"),
        ("hook_resid_mid", "post_attn"),
        ("hook_resid_post", "post_block"),
        ("hook_mlp_out", "mlp_out"),
    ],
)
def test_transformer_lens_names_are_ours(tmp_path: Path, name: str, hook: str) -> None:
    folder = _foreign.saelens(tmp_path / "sae", DECODER, hook_name=f"blocks.0.{name}")
    assert list(read_saelens(folder, 0).vectors) == [(0, hook)]


def test_a_place_that_is_no_hook_point_must_be_given(tmp_path: Path) -> None:
    place = "blocks.3.attn.hook_z"
    folder = _foreign.saelens(tmp_path / "sae", DECODER, hook_name=place)
    with pytest.raises(SteeringValidationError, match="--hook and --layer"):
        read_saelens(folder, 0)
    found = read_saelens(folder, 0, (3, "post_attn"))
    assert list(found.vectors) == [(3, "post_attn")]


@pytest.mark.parametrize("feature", [-1, 5])
def test_a_feature_that_there_is_not_is_refused(tmp_path: Path, feature: int) -> None:
    folder = _foreign.saelens(tmp_path / "sae", DECODER, hook_name=POST)
    with pytest.raises(SteeringValidationError, match="features are 0 to 4"):
        read_saelens(folder, feature)


def test_folders_that_are_no_sae_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SteeringValidationError, match="not an SAE"):
        read_saelens(tmp_path, 0)
    (tmp_path / "cfg.json").write_text("[]")
    with pytest.raises(SteeringValidationError, match="object"):
        read_saelens(tmp_path, 0)
    (tmp_path / "cfg.json").write_text("{}")
    with pytest.raises(SteeringValidationError, match="no decoder"):
        read_saelens(tmp_path, 0)
    (tmp_path / "sae_weights.safetensors").write_bytes(b"nonsense")
    with pytest.raises(SteeringValidationError, match="no decoder"):
        read_saelens(tmp_path, 0)
