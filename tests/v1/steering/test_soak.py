# SPDX-License-Identifier: Apache-2.0
"""Many requests, more configurations than slots, little memory, random aborts."""

import random
from typing import Any

import pytest
import torch

from tests.v1.steering import _engine, _models

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS, CONFIGS = 150, 25


def plain_params(config: int | None) -> Any:
    sampling = _engine.params(8 + 7 * (config or 0) % 32)
    sampling.logprobs = None
    if config is not None:
        torch.manual_seed(config)
        hook = ("pre_attn", "post_attn", "post_block")[config % 3]
        vector = torch.randn(_models.HIDDEN) * 2
        tier = ("steering_vectors", "prefill_steering_vectors")[config % 2]
        setattr(sampling, tier, {hook: {config % _models.LAYERS: vector}})
    return sampling


def prompt(index: int) -> list[int]:
    return [(index % 5 * 11 + j * 3) % _models.VOCAB for j in range(40 + index % 7)]


def test_every_output_equals_its_solo_run_and_no_slot_leaks(
    tmp_path_factory: Any,
) -> None:
    path = _models.save("llama", tmp_path_factory.mktemp("llama"))
    llm = _engine.engine(
        path,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=14,
        max_num_batched_tokens=64,
        max_model_len=128,
    )
    engine: Any = llm.llm_engine
    chosen = random.Random(0)
    wanted: dict[str, tuple[int, int | None]] = {}
    outputs: dict[str, list[int]] = {}
    waiting = list(range(REQUESTS))
    while waiting or engine.has_unfinished_requests():
        while waiting and chosen.random() < 0.5:
            index = waiting.pop()
            config = None if index % 6 == 0 else chosen.randrange(CONFIGS)
            name = str(index)
            wanted[name] = index, config
            engine.add_request(
                name, {"prompt_token_ids": prompt(index)}, plain_params(config)
            )
        if wanted and chosen.random() < 0.03:
            gone = chosen.choice(sorted(wanted.keys() - outputs.keys() or wanted))
            engine.abort_request([gone])
            if gone not in outputs:
                del wanted[gone]
        for output in engine.step():
            if output.finished and output.request_id in wanted:
                outputs[output.request_id] = _engine.tokens(output)
    assert outputs.keys() == wanted.keys()
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    assert scheduler.steering.slots.in_use == 0
    engine.step()  # Carries the last ends to the worker.
    residual = core.model_executor.driver_worker.worker.model_runner.residual
    assert len(residual.steering._slots) <= 4
    assert len(residual.steering._prompt_lengths) <= 8
    solo: dict[tuple[int, int | None], list[int]] = {}
    for name, (index, config) in wanted.items():
        key = (index % 35, config)
        if key not in solo:
            assert llm.reset_prefix_cache()
            (output,) = _engine.generate(llm, [prompt(index)], [plain_params(config)])
            solo[key] = _engine.tokens(output)
        assert outputs[name] == solo[key], f"request {name}, configuration {config}"
    engine.engine_core.shutdown()
