# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, steered requests and plain ones share batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import RANK, adapter
from tests.support.inner_reference import InnerReference
from tests.support.models import llama
from tests.support.scripts import load
from tests.v1.steering import _engine, _models
from tests.v1.steering._engine import compared, params
from tests.v1.steering._models import vector
from vllm.lora.request import LoRARequest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.multiprocess]

EXAMPLES = Path(__file__).parents[3] / "examples" / "steering"
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
SIZE = len(PROMPT)
ADAPTERS = (None, 1, 2)
TAP = (1, "post_attn")


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine, the reference models of its adapters, and requests."""

    llm: Any
    references: dict[int | None, InnerReference]
    adapters: dict[int | None, LoRARequest | None]

    def run(self, **fields: Any) -> list[Any]:
        """Run the prompt with each adapter."""
        prompts = [{"prompt_token_ids": PROMPT} for _ in ADAPTERS]
        lora = [self.adapters[number] for number in ADAPTERS]
        found: list[Any] = self.llm.generate(
            prompts, params(**fields), lora_request=lora, use_tqdm=False
        )
        return found


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    path = llama(tmp_path_factory.mktemp("llama"))
    references = {None: InnerReference(path)}
    adapters: dict[int | None, LoRARequest | None] = {None: None}
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("adapter")
        references[number] = InnerReference(adapter(path, folder, number).model)
        adapters[number] = LoRARequest(f"adapter {number}", number, str(folder))
    llm = _engine.engine(
        str(path),
        enable_lora=True,
        max_lora_rank=RANK,
        # One slot more than adapters: upstream's CPU kernels apply the last slot's
        # adapter to requests without one.
        max_loras=3,
        capture_consumers=["inline"],
        hook_points=["mlp_act"],
    )
    yield Bench(llm, references, adapters)
    llm.llm_engine.engine_core.shutdown()


def test_the_engines_vectors_steer_adapters_too(bench: Bench) -> None:
    llm = bench.llm
    layer, hook = TAP
    llm.set_steering({hook: {layer: vector(7)}})
    try:
        outputs = bench.run()
    finally:
        llm.clear_steering()
    change = _models.add_by_phase(SIZE, vector(7), vector(7))
    for number, output in zip(ADAPTERS, outputs, strict=True):
        error, _ = compared(output, bench.references[number], {TAP: change})
        assert error < 1e-4, (number, error)


def test_the_input_of_a_projection_with_adapters_is_read_and_changed(
    bench: Bench,
) -> None:
    tap, added = (1, "mlp_act"), torch.linspace(-1, 1, 96)
    outputs = bench.run(
        capture={"inline": {"hooks": {"mlp_act": [1]}, "positions": "all_prompt"}},
        steering_vectors={"mlp_act": {1: added}},
    )
    for number, output in zip(ADAPTERS, outputs, strict=True):
        reference = bench.references[number]
        error, effect = compared(output, reference, {tap: lambda rows: rows + added})
        assert error < 1e-4 and effect > 1e-3, (number, error, effect)
        rows = output.capture_results["inline"].payload[tap]
        torch.testing.assert_close(
            rows, reference.rows_at(PROMPT, tap), atol=1e-4, rtol=1e-4
        )


def test_an_oracle_reads_the_row_of_another_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example: a plain run's row, added norm-matched under an adapter."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = load(EXAMPLES, "oracle")
    subject, before, after = PROMPT[:7], PROMPT[3:8], PROMPT[8:]
    read = bench.references[None].rows_at(subject, example.READ)
    row = example.row_of(bench.llm, subject)
    assert torch.allclose(row, read[-1], rtol=1e-4, atol=1e-4)

    def inject(stream: torch.Tensor) -> torch.Tensor:
        changed, place = stream.clone(), len(before) - 1
        changed[place] += stream[place].norm() * row / row.norm()
        return changed

    for number in (1, 2):
        oracle = bench.adapters[number]
        output = example.ask(
            bench.llm, oracle, row, before, after, max_tokens=4, logprobs=-1
        )
        changes = {example.WRITE: inject}
        wrong, effect = compared(output, bench.references[number], changes)
        assert wrong < 1e-4 and effect > 1e-3
