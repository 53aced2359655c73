# SPDX-License-Identifier: Apache-2.0
"""Every hook point of every layer holds what the Transformers library computes.

In float32 a difference is rounding, so 1e-4 tells a wrong place from a right one;
the negative controls show that it would.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.engines.captured import HOOKS, CapturedEngine, asking
from tests.engines.models import save
from tests.engines.reference import Reference, Stream, relative_error
from tests.parity.models import ARCHITECTURES, VOCABULARY, Architecture

pytestmark = pytest.mark.e2e

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CASES = [(a, torch.float32) for a in ARCHITECTURES] + [
    (a, torch.bfloat16) for a in ARCHITECTURES if a.bfloat16
]


@dataclass(frozen=True)
class Compared:
    """The rows of three requests, captured and expected."""

    dtype: torch.dtype
    requests: list[tuple[Stream, Stream]]
    num_prompt_tokens: list[int]

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (5, 41, 18)
    ]


def compare(architecture: Architecture, dtype: torch.dtype, folder: Path) -> Compared:
    # Wild weights amplify rounding from layer to layer: milder ones in bfloat16.
    scale = 0.2 if dtype == torch.float32 else 0.1
    model = save(architecture.config(), folder, dtype, scale=scale)
    engine = CapturedEngine(
        model,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=128,
        max_num_batched_tokens=32,
        skip_tokenizer_init=True,
        reference=Reference(model, dtype, architecture.places),
    )
    outputs = engine.run(prompts(), asking("all", max_tokens=10, detokenize=False))
    requests = []
    for output in outputs:
        fed = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        requests.append((engine.rows(output), engine.reference.stream(fed)))
    engine.close()
    return Compared(dtype, requests, [len(prompt) for prompt in prompts()])


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=[f"{a.name}-{str(dtype).removeprefix('torch.')}" for a, dtype in CASES],
)
def compared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compared]:
    architecture, dtype = request.param
    yield compare(architecture, dtype, tmp_path_factory.mktemp("model"))


def test_every_layer_has_its_three_points(compared: Compared) -> None:
    for found, expected in compared.requests:
        layers = max(layer for layer, _ in expected) + 1
        assert set(found) == {(i, hook) for i in range(layers) for hook in HOOKS}
        assert all(rows.dtype == compared.dtype for rows in found.values())


def test_rows_are_those_of_the_library(compared: Compared) -> None:
    errors = {
        (number, tap): relative_error(rows, expected[tap])
        for number, (found, expected) in enumerate(compared.requests)
        for tap, rows in found.items()
    }
    wrong = {what: e for what, e in errors.items() if not e <= compared.tolerance}
    assert not wrong


def neighbours(stream: Stream, compared: Compared) -> Iterator[tuple[str, bool]]:
    """Rows that are a little wrong, and whether the comparison lets them pass."""
    for (layer, hook), rows in stream.items():

        def passes(other: torch.Tensor, rows: torch.Tensor = rows) -> bool:
            return relative_error(other, rows) <= compared.tolerance

        here = f"layer {layer} {hook}"
        yield f"{here}, one position off", passes(rows.roll(1, dims=0))
        yield f"{here}, too large by a tenth", passes(rows * 1.1)
        if (layer + 1, hook) in stream:
            yield f"{here}, one layer off", passes(stream[layer + 1, hook])
        if hook != "pre_attn":
            # pre_attn -> post_attn -> post_block: what one branch added.
            before = HOOKS[HOOKS.index(hook) - 1]
            branch = rows - stream[layer, before]
            yield f"{here}, the branch alone", passes(branch)
            yield f"{here}, the branch twice", passes(rows + branch)
            yield f"{here}, without the branch", passes(rows - branch)


def test_the_comparison_tells_what_is_a_little_wrong(compared: Compared) -> None:
    for _, expected in compared.requests:
        passed = [what for what, passes in neighbours(expected, compared) if passes]
        assert not passed
