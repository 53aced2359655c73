# SPDX-License-Identifier: Apache-2.0
"""Files of probes say for which model they are."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.readouts.modules import ModuleInfo, check_model
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
