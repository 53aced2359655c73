# SPDX-License-Identifier: Apache-2.0
"""Ranks that split the tokens between layers give the results of one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.multiprocess.architectures import common
from tests.multiprocess.shares import LAYERS, NEW_TOKENS, Order, run
from tests.parity.families.llama import YARN
from tests.support.hf_reference import Reference, relative_error
from tests.support.models import save

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]

HOOKS = ("pre_attn", "post_attn", "post_block")
TAPS = {(layer, hook) for layer in range(LAYERS) for hook in HOOKS}
SHARING = {"begins": [False, True, True, True], "throughout": [True] * LAYERS}
"""The layers that split tokens, if layers of experts start the splitting, and if the
model does."""
WIDTH = 64
Found = dict[str, Any]
COMMON = common(moe_intermediate_size=64, num_experts_per_tok=2)


def begins() -> transformers.PretrainedConfig:
    """The first layer of experts receives all tokens from the dense layer before it."""
    return transformers.DeepseekV2Config(
        **COMMON,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        # Upstream's latent attention on a CPU supports one size, and scaled rotations.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    )


def throughout() -> transformers.PretrainedConfig:
    """The model splits its tokens before the first layer."""
    return transformers.Qwen3NextConfig(
        **COMMON,
        head_dim=32,
        # Upstream's linear attention on a CPU supports bfloat16 only.
        layer_types=["full_attention"] * LAYERS,
        num_experts=8,
        shared_expert_intermediate_size=64,
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """A model that splits tokens, and the options that its engines need."""

    config: Callable[[], transformers.PretrainedConfig]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest deviations of results, relative to their norm."""

    rows: float
    """Deviation from the library's rows."""
    together: float
    """Deviation of one process's results from those of several."""
    exact: bool
    """Whether tokens must be equal; otherwise a close decision may differ, and later
    tokens are not compared."""


@dataclass(frozen=True, slots=True)
class Models:
    """Checkpoints, and the results of one process, each computed once."""

    folder: Path
    kinds: dict[str, Kind]
    ways: dict[str, dict[str, Any]]
    """Ways of splitting: one engine of two ranks, or two such engines, as upstream
    does."""
    width: int
    bounds: Bounds
    dtype: torch.dtype = torch.float32
    cuda: bool = False
    found: dict[str, Found] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        path, more = self.folder / name, {"scale": 0.1} if self.cuda else {}
        if not path.exists():
            save(self.kinds[name].config(), path, self.dtype, **more)
        return path

    def run(self, name: str, way: str) -> Found:
        """The results of a way's processes; `whole` is a single process."""
        chosen = self.ways.get(way, {"eager": False} if self.cuda else {})
        order = Order(
            str(self.path(name)),
            str(self.folder / f"{name}-{way}.pt"),
            self.width,
            shares=way != "whole",
            cuda=self.cuda,
            more=self.kinds[name].options,
            **chosen,
        )
        return run(order)

    def whole(self, name: str) -> Found:
        if name not in self.found:
            self.found[name] = self.run(name, "whole")
        return self.found[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(
        tmp_path_factory.mktemp("shares"),
        {
            "begins": Kind(begins, {"attention_backend": "CPU_MLA"}),
            "throughout": Kind(throughout, {}),
        },
        {"v1": {}, "v2": {"runner": 2}, "engines": {"engines": 2}},
        WIDTH,
        Bounds(rows=1e-4, together=1e-4, exact=True),
    )


@pytest.fixture(
    scope="module",
    params=[
        ("begins", "v1"),
        ("begins", "v2"),
        ("begins", "engines"),
        ("throughout", "v1"),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(scope="module")
def name(case: tuple[str, str]) -> str:
    return case[0]


@pytest.fixture(scope="module")
def whole(models: Models, name: str) -> Found:
    return models.whole(name)


@pytest.fixture(scope="module")
def shared(models: Models, case: tuple[str, str]) -> Found:
    return models.run(*case)


def test_the_layers_of_experts_share_their_tokens(
    name: str, whole: Found, shared: Found
) -> None:
    assert whole["shares"] == [[False] * LAYERS]
    assert SHARING[name] in shared["shares"]


def test_rows_are_those_of_the_library(
    models: Models, name: str, shared: Found
) -> None:
    reference = Reference(models.path(name))
    for request in shared["plain"]:
        fed = [*request["prompt"], *request["tokens"]][:-1]
        expected = reference.stream(fed)
        assert len(request["tokens"]) == NEW_TOKENS
        assert set(request["rows"]) == TAPS
        for tap, rows in request["rows"].items():
            assert relative_error(rows, expected[tap]) < models.bounds.rows, tap
            assert request["positions"][tap] == list(range(len(fed)))


@pytest.mark.parametrize("kind", ["plain", "added", "operated", "alone"])
def test_shared_tokens_give_what_one_process_gives(
    models: Models, whole: Found, shared: Found, kind: str
) -> None:
    bounds, generated = models.bounds, 0
    for one, other in zip(whole[kind], shared[kind], strict=True):
        agreeing = same(one["tokens"], other["tokens"])
        generated += agreeing
        assert agreeing == NEW_TOKENS or not bounds.exact
        assert other["results"] == {"keeper": ("ok", None)}
        tokens = NEW_TOKENS if bounds.exact else 1
        apart = relative_error(logits(other)[:tokens], logits(one)[:tokens])
        assert apart < bounds.together
        length = len(one["prompt"]) + agreeing
        assert one["rows"].keys() == other["rows"].keys() == TAPS
        for tap, rows in one["rows"].items():
            assert len(other["rows"][tap]) == len(rows)
            apart = relative_error(other["rows"][tap][:length], rows[:length].float())
            assert apart < bounds.together, tap
    assert generated >= NEW_TOKENS * len(whole[kind]) / 2


def same(one: list[int], other: list[int]) -> int:
    """Number of leading tokens that are equal."""
    differing = [a != b for a, b in zip(one, other, strict=True)]
    return differing.index(True) if True in differing else len(one)


@pytest.mark.parametrize("kind", ["added", "operated"])
def test_what_steers_a_request_matters(shared: Found, kind: str) -> None:
    for plain, steered in zip(shared["plain"], shared[kind], strict=True):
        assert relative_error(logits(steered)[:1], logits(plain)[:1]) > 1e-3


def logits(request: Found) -> torch.Tensor:
    return torch.tensor(request["logprobs"])
