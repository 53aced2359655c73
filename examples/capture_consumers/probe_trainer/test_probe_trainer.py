# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_trainer import ProbeTrainer

from vllm.v1.capture.types import CaptureContext, CaptureKey, VllmInternalRequestId

REQUEST = VllmInternalRequestId("r")
KEY: CaptureKey = (REQUEST, 3, "post_block")


def context() -> CaptureContext:
    return CaptureContext(REQUEST, 5, 0, 6, 4, 4, 1, 1)


def teach(probe: ProbeTrainer, row: torch.Tensor, label: int | None) -> dict[str, Any]:
    client = {} if label is None else {"label": label}
    return probe.on_capture(KEY, row[None], {"client_spec": client})


def test_it_learns_what_separates_two_kinds_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(16, generator=generator)
    probe = ProbeTrainer(None, {"layer": 3})
    for step in range(200):
        label = step % 2
        noise = torch.randn(16, generator=generator)
        answer = teach(probe, noise + (2 * label - 1) * direction, label)
    assert answer["accuracy"] > 0.9
    assert teach(probe, direction, None)["probability"] > 0.8
    assert teach(probe, -direction, None)["probability"] < 0.2


def test_asking_teaches_nothing() -> None:
    probe = ProbeTrainer(None, {"layer": 3})
    row = torch.ones(4)
    assert teach(probe, row, None) == {"probability": 0.5, "accuracy": None}
    assert teach(probe, row, None)["probability"] == 0.5
    teach(probe, row, 1)
    assert teach(probe, row, None)["probability"] > 0.5


def test_the_weights_are_saved_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe.pt"
    probe = ProbeTrainer(None, {"layer": 3, "save": str(path)})
    probe.shutdown()
    assert not path.exists(), "there was nothing to save"
    teach(probe, torch.ones(4), 1)
    probe.shutdown()
    assert torch.load(path, weights_only=True).shape == (5,)


@pytest.mark.parametrize("raw", [None, [], {"label": 2}, {"label": "x"}, {"x": 1}])
def test_anything_but_a_label_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="probe_trainer"):
        ProbeTrainer(None, {"layer": 3}).validate_client_spec(raw, context())


def test_the_row_of_the_last_prompt_token_is_asked_for() -> None:
    probe = ProbeTrainer(None, {"layer": 3, "hook": "pre_attn"})
    spec = probe.validate_client_spec({"label": 0}, context())
    assert spec.hooks == {"pre_attn": [3]} and spec.positions == "last_prompt"


@pytest.mark.parametrize("params", [{}, {"layer": 1, "depth": 2}])
def test_parameters_are_checked(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="layer="):
        ProbeTrainer(None, params)
