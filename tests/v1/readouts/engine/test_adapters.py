# SPDX-License-Identifier: Apache-2.0
"""A lens on a server with LoRA adapters: each row gets its own request's head."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import RANK, adapter
from tests.support.captured import CapturedEngine, prompt
from tests.support.hf_reference import Reference
from tests.support.models import llama
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.readouts.worker.head import RowAdapters

PROMPTS = [prompt(9, 1), prompt(12, 2), prompt(7, 3)]


def test_the_head_adds_the_adapter_of_each_row() -> None:
    draw = torch.Generator().manual_seed(1)
    down = torch.randn(3, 1, 4, 8, generator=draw)
    up = torch.randn(3, 1, 20, 4, generator=draw)
    rows = torch.randn(5, 8, generator=draw)
    logits = torch.randn(5, 24, generator=draw)  # with padding of the vocabulary
    slots = [2, -1, 0, 2, -1]
    expected = logits.clone()
    for number, slot in enumerate(slots):
        if slot >= 0:
            expected[number, :20] += 0.5 * up[slot, 0] @ (down[slot, 0] @ rows[number])
    found = RowAdapters(slots).add_lora_logits(logits, rows, down, up, 0.5)
    torch.testing.assert_close(found, expected)


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[CapturedEngine, Reference, LoRARequest]]:
    model: Path = llama(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("adapter")
    merged = adapter(model, folder)
    engine = CapturedEngine(
        model, enable_lora=True, max_lora_rank=RANK, max_loras=2, enable_readouts=True
    )
    yield engine, merged, LoRARequest("mine", 1, str(folder))
    engine.close()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_lens_with_and_without_an_adapter(
    adapted: tuple[CapturedEngine, Reference, LoRARequest],
) -> None:
    engine, merged, lora = adapted
    lens = {"kind": "lens", "layers": "all", "top_k": 3, "positions": "all"}
    params = SamplingParams(
        readouts={"lens": lens}, max_tokens=4, temperature=0.0, ignore_eos=True
    )
    prompts: Any = [{"prompt_token_ids": one} for one in PROMPTS]
    for own in ([None, None, None], [None, lora, None]):
        outputs = engine.llm.generate(prompts, params, use_tqdm=False, lora_request=own)
        for output, one in zip(outputs, own, strict=True):
            reference = engine.reference if one is None else merged
            assert output.prompt_token_ids is not None
            fed = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
            found = output.readouts["lens"]
            assert found.error is None
            stream = reference.stream(fed)
            inner = reference.model
            for number, tap in enumerate(found.taps):
                with torch.no_grad():
                    logits = inner.lm_head(inner.model.norm(stream[tap]))
                best = logits.log_softmax(-1).topk(3, dim=-1).values
                values = torch.from_numpy(found["logprobs"][:, number])
                torch.testing.assert_close(values, best, atol=2e-3, rtol=0)
