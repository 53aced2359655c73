# SPDX-License-Identifier: Apache-2.0
"""Many requests, more configurations than slots, little memory, random aborts."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.v1.steering import _engine, _models
from vllm.v1.steering.plan import PackedVectors

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SLOTS = 4
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
HOOKS = ("pre_attn", "post_attn", "post_block")
GROWTH = 48 << 20
"""Bytes by which the process may grow between a quarter of a soak and its end."""

Kind = tuple[int | None, int]
"""A configuration, and one of its prompts: an output depends on these."""


def sampling(config: int | None) -> Any:
    params = _engine.params(8 + 7 * (config or 0) % 32)
    params.logprobs = None
    if config is not None:
        torch.manual_seed(config)
        entry: dict[str, Any] = {"vector": torch.randn(_models.HIDDEN) * 2}
        if config % 7 == 0:
            entry |= {"op": "clamp", "min": -0.5, "max": 0.5}
        spec = {HOOKS[config % 3]: {config % _models.LAYERS: entry}}
        setattr(params, TIERS[config // 3 % 3], spec)
    return params


def prompt(kind: Kind) -> list[int]:
    number = 3 * (kind[0] or 0) + kind[1]
    return [(number % 5 * 11 + j * 3) % _models.VOCAB for j in range(40 + number % 7)]


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def packed_vectors() -> int:
    """How many there are, those of earlier tests included."""
    gc.collect()
    return sum(isinstance(one, PackedVectors) for one in gc.get_objects())


class Soak:
    """Adds requests, aborts some, and waits for the others."""

    def __init__(self, llm: Any, requests: int, configs: int) -> None:
        self.llm, self.engine = llm, llm.llm_engine
        self.chosen = random.Random(0)
        self.kinds = [
            (None if i % 6 == 0 else self.chosen.randrange(configs), i % 3)
            for i in range(requests)
        ]
        self.wanted: set[str] = set()
        self.finished: set[str] = set()
        self.sizes: list[int] = []
        self.aborted = 0
        self.packed_before = packed_vectors()

    def run(self) -> None:
        waiting = list(enumerate(self.kinds))
        marks = [len(waiting) * 3 // 4, 0]
        while waiting or self.engine.has_unfinished_requests():
            while waiting and self.chosen.random() < 0.5:
                self._add(*waiting.pop())
                if marks and len(waiting) == marks[0]:
                    marks.pop(0)
                    self.sizes.append(resident_bytes())
            in_flight = sorted(self.wanted - self.finished)
            if in_flight and self.chosen.random() < 0.03:
                self._abort(self.chosen.choice(in_flight))
            for output in self.engine.step():
                if output.finished and output.request_id in self.wanted:
                    self.finished.add(output.request_id)

    def _add(self, number: int, kind: Kind) -> None:
        self.wanted.add(str(number))
        inputs = {"prompt_token_ids": prompt(kind)}
        self.engine.add_request(str(number), inputs, sampling(kind[0]))

    def _abort(self, name: str) -> None:
        self.engine.abort_request([name])
        self.wanted.remove(name)
        self.aborted += 1

    def check_nothing_is_left(self) -> None:
        core = self.engine.engine_core.engine_core
        assert core.scheduler.residual.steering.slots.in_use == 0
        assert self.llm.get_steering()["rows_in_use"] == 0
        self.engine.step()  # Sends the last ends to the worker.
        runner = core.model_executor.driver_worker.worker.model_runner
        steering = runner.residual.steering
        assert len(steering._slots) <= SLOTS
        assert len(steering._prompt_lengths) <= 8
        alive = packed_vectors() - self.packed_before
        assert alive <= 3 * SLOTS, "vectors of requests that have ended"


@pytest.mark.parametrize(
    ("requests", "configs"),
    [
        (150, 25),
        pytest.param(
            2000, 200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)], id="long"
        ),
    ],
)
def test_nothing_is_left_of_requests(
    tmp_path_factory: Any, requests: int, configs: int
) -> None:
    path = _models.save("llama", tmp_path_factory.mktemp("llama"))
    llm = _engine.engine(
        path,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=14,
        max_num_batched_tokens=64,
        max_model_len=128,
        max_steering_configs=SLOTS,
    )
    soak = Soak(llm, requests, configs)
    soak.run()
    assert soak.aborted > requests / 50
    soak.check_nothing_is_left()
    early, late = soak.sizes
    assert late - early < GROWTH, f"grew by {(late - early) >> 20} MiB"
    llm.llm_engine.engine_core.shutdown()
