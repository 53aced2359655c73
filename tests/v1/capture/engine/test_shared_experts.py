# SPDX-License-Identifier: Apache-2.0
"""`mlp_act` beside routed experts is that of the shared experts' MLP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.hf_reference import relative_error
from tests.support.models import SIZES
from tests.v1.capture.engine.test_inner_points import PROMPT, Pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DENSE, SHARED = 96, 48


def qwen2_moe() -> Any:
    return transformers.Qwen2MoeConfig(
        **SIZES,
        mlp_only_layers=[0],
        shared_expert_intermediate_size=SHARED,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


def granite() -> Any:
    return transformers.GraniteMoeSharedConfig(
        **SIZES | {"intermediate_size": 32},
        shared_intermediate_size=SHARED,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def glm() -> Any:
    return transformers.Glm4MoeConfig(
        **SIZES,
        first_k_dense_replace=1,
        moe_intermediate_size=SHARED,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )


KINDS = {
    "qwen2_moe": (qwen2_moe, (DENSE, SHARED)),
    "granite": (granite, (SHARED, SHARED)),
    "glm": (glm, (DENSE, SHARED)),
}
"""By name: the configuration, and the width of the point in each layer."""


def opened(kind: str, folder: Path, **options: Any) -> Pair:
    config, _ = KINDS[kind]
    chosen = {
        "hook_points": ["mlp_act"],
        "enforce_eager": kind != "qwen2_moe",
        "enable_readouts": False,
    }
    return Pair(kind, folder, config=config(), **chosen | options)


@pytest.fixture(scope="module", params=[*KINDS])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    pair = opened(request.param, tmp_path_factory.mktemp(request.param))
    yield pair
    pair.engine.close()


def test_rows_are_those_of_the_library_in_each_layer_s_width(pair: Pair) -> None:
    output = pair.ask(hooks={"mlp_act": "all"})
    pair.reference.run([*PROMPT, *output.outputs[0].token_ids][:-1])
    found = pair.engine.rows(output)
    for layer, width in enumerate(KINDS[pair.kind][1]):
        expected = pair.reference.rows[layer, "mlp_act"]
        assert found[layer, "mlp_act"].shape[1] == width
        assert relative_error(found[layer, "mlp_act"].float(), expected) < 1e-4


@pytest.mark.parametrize("layer", [0, 1])
def test_additions_enter_the_projection(pair: Pair, layer: int) -> None:
    generator = torch.Generator().manual_seed(3)
    vector = torch.randn(KINDS[pair.kind][1][layer], generator=generator) * 5
    entry = {"vector": vector.numpy()}
    pair.check_changed((layer, "mlp_act"), entry, lambda rows: rows + vector)
