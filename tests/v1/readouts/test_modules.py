# SPDX-License-Identifier: Apache-2.0
"""Files of probes say for which model they are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.steering.sae import _layouts
from vllm.v1.readouts.engine_args import described_file
from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.readouts.modules import ModuleInfo, check_model, save_probe
from vllm.v1.steering.spec.model_identity import ModelIdentity


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


@pytest.mark.parametrize("kind", ["sae", "probe"])
def test_a_file_for_another_width_is_refused_before_the_model_is_loaded(
    tmp_path: Path, kind: str
) -> None:
    config: Any = SimpleNamespace(get_hidden_size=lambda: 8, model="m")
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
