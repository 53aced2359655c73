# SPDX-License-Identifier: Apache-2.0
"""`mlp_act` beside routed experts is that of the shared experts' MLP."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from tests.support.captured import (
    LOGITS,
    CapturedEngine,
    asking_logits,
    check_effect,
    logprobs_of,
)
from tests.support.hf_reference import relative_error
from tests.support.models import SIZES, save
from vllm import RequestOutput

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORDS, PROMPT = 256, [5, 9, 3, 77, 21, 8, 40]
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
    "qwen2_moe": (qwen2_moe, "mlp.shared_expert.down_proj", (DENSE, SHARED)),
    "granite": (granite, "shared_mlp.output_linear", (SHARED, SHARED)),
    "glm": (glm, "mlp.shared_experts.down_proj", (DENSE, SHARED)),
}
"""By name: the configuration, the second projection of the shared experts, and the
width of the point in each layer."""


class Pair:
    """An engine, and the library's model."""

    def __init__(self, kind: str, folder: Any, **options: Any) -> None:
        config, self.down, self.widths = KINDS[kind]
        model = save(config(), folder)
        self.library = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.engine = CapturedEngine(
            model,
            hook_points=["mlp_act"],
            **LOGITS | {"enforce_eager": kind != "qwen2_moe"} | options,
        )

    def ask(self, steering: Any = None) -> RequestOutput:
        params = asking_logits(3, hooks={"mlp_act": "all"}, steering_vectors=steering)
        (output,) = self.engine.run([PROMPT], params)
        return output

    def run(
        self, output: RequestOutput, layer: int, added: torch.Tensor | float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that enter the projection, and the logits of generated tokens."""
        seen: list[torch.Tensor] = []

        def hook(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            seen.append(args[0].reshape(-1, args[0].shape[-1]))
            return (args[0] + added,)

        block = self.library.model.layers[layer]
        dense = self.widths[layer] == DENSE
        down = block.get_submodule("mlp.down_proj" if dense else self.down)
        handle = down.register_forward_pre_hook(hook)
        fed = [*PROMPT, *output.outputs[0].token_ids][:-1]
        with torch.no_grad():
            logits = self.library(torch.tensor([fed]), use_cache=False).logits[0]
        handle.remove()
        (rows,) = seen
        return rows, logits[len(PROMPT) - 1 :]


@pytest.fixture(scope="module", params=[*KINDS])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    opened = Pair(request.param, tmp_path_factory.mktemp(request.param))
    yield opened
    opened.engine.close()


def test_rows_are_those_of_the_library_in_each_layer_s_width(pair: Pair) -> None:
    output = pair.ask()
    found = pair.engine.rows(output)
    for layer, width in enumerate(pair.widths):
        rows, _ = pair.run(output, layer)
        assert found[layer, "mlp_act"].shape[1] == width
        assert relative_error(found[layer, "mlp_act"].float(), rows) < 1e-4


@pytest.mark.parametrize("layer", [0, 1])
def test_additions_enter_the_projection(pair: Pair, layer: int) -> None:
    generator = torch.Generator().manual_seed(3)
    vector = torch.randn(pair.widths[layer], generator=generator) * 5
    output = pair.ask({"mlp_act": {layer: vector.numpy()}})
    _, plain = pair.run(output, layer)
    _, expected = pair.run(output, layer, vector)
    check_effect(logprobs_of(output, WORDS), plain, expected)
