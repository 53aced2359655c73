# SPDX-License-Identifier: Apache-2.0
"""A feature's change is that of an encoder which computes all features."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.programs import run
from vllm.model_executor.layers.residual.program import GATE_COLUMNS
from vllm.v1.residual.sae import SparseAutoencoder
from vllm.v1.residual.sae.encode import encode
from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.worker.features import feature_instruction, together

WIDTH, SIZE, ROWS = 16, 48, 200


def sae_of(selection: Any, k: int, norm: Any) -> SparseAutoencoder:
    made = torch.Generator().manual_seed(k)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    return SparseAutoencoder(
        name="own",
        layout="saelens",
        w_enc=randn(WIDTH, SIZE),
        b_enc=randn(SIZE),
        w_dec=randn(SIZE, WIDTH),
        b_dec=randn(WIDTH),
        selection=selection,
        k=k,
        input_norm=norm,
    )


@pytest.mark.parametrize("norm", ["none", "constant_norm_rescale", "layer_norm"])
@pytest.mark.parametrize(
    ("selection", "k"), [("topk", 12), ("abstopk", 20), ("groupmax", 12), ("topk", 48)]
)
def test_selected_features_are_set_and_scaled(
    selection: str, k: int, norm: str
) -> None:
    sae = sae_of(selection, k, norm)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    uses = [
        FeatureUse("own", "f", 3, 5.0, "set"),
        FeatureUse("own", "f", 17, -2.0, "scale"),
        FeatureUse("own", "f", 18, 3.0, "set"),
    ]
    made = [
        (
            "own",
            (
                number,
                feature_instruction(
                    SimpleNamespace(details=SimpleNamespace(feature=use)),  # type: ignore[arg-type]
                    lambda _: sae,
                ),
            ),
        )
        for number, use in enumerate(uses)
    ]
    program = tuple(one for _, one in together(made))
    assert len(program) == (2 if selection == "groupmax" else 1), "rivals are shared"
    gates = torch.zeros(ROWS, GATE_COLUMNS)
    found, _ = run(program[:1], rows, torch.arange(ROWS), gates)
    joined = [use for use in uses if len(program) == 1 or use.feature < SIZE // k]
    activations, size = encode(sae, rows).double(), torch.ones(ROWS).double()
    if norm == "constant_norm_rescale":
        size = rows.double().norm(dim=-1) / WIDTH**0.5
    elif norm == "layer_norm":
        size = rows.double().std(dim=-1)
    wanted = rows.double()
    shares = []
    for use in joined:
        before = activations[:, use.feature]
        shares.append(float((before != 0).double().mean()))
        after = before * use.value if use.mode == "scale" else use.value
        change = size * (after - before)
        wanted += change[:, None] * sae.w_dec[use.feature].double()
    assert all(0.02 < share < 0.98 for share in shares) or k == SIZE
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
