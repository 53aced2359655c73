# SPDX-License-Identifier: Apache-2.0
"""In any batch, each request's rows equal those of its own model alone.

Chunked prompts, cache hits, preemption, LoRA adapters, steering, prompts given as
embeddings, several samples, stop strings and aborts, in any combination.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from tests.support import asynchronous
from tests.support.adapters import RANK, adapter
from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import Reference, Stream, changing, relative_error
from vllm.lora.request import LoRARequest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.multiprocess]

EXAMPLES = int(os.environ.get("ANY_BATCH_EXAMPLES", "5"))
WIDTH = 64
MOST_STEPS = 5000
HOOKS = {"pre_attn": [1, 2], "post_attn": [0], "post_block": [0, 2]}


@dataclass(frozen=True, slots=True)
class Wish:
    """One request."""

    length: int
    text: int
    """Index of one of few prompts, so that some are equal."""
    max_tokens: int
    positions: Any
    special: bool
    """Whether it uses an adapter, or its prompt is given as embeddings; the bench
    decides."""
    steered: int | None
    """Index of one of few vectors."""
    samples: int
    stop: str | None
    abort_after: int | None
    """Number of the engine's steps until the abort."""

    @property
    def prompt(self) -> list[int]:
        return prompt(self.length, seed=self.text)


LENGTHS, MAX_TOKENS = [1, 7, 32, 33, 64, 70], [1, 3, 20]


@st.composite
def wishes(
    draw: st.DrawFn,
    lengths: Sequence[int] = LENGTHS,
    outputs: Sequence[int] = MAX_TOKENS,
) -> Wish:
    length = draw(st.sampled_from(lengths))
    max_tokens = draw(st.sampled_from(outputs))
    last = length + max_tokens - 2
    listed = st.sets(st.integers(0, max(last, 0)), min_size=1, max_size=6)
    named = st.sampled_from(["all", "all_prompt", "all_generated", "last_prompt"])
    return Wish(
        length=length,
        text=draw(st.integers(0, 2)),
        max_tokens=max_tokens,
        positions=draw(named | listed.map(sorted)) if last >= 0 else "all",
        special=draw(st.booleans()),
        steered=draw(st.none() | st.integers(0, 2)),
        samples=draw(st.sampled_from([1, 1, 1, 2])),
        stop=draw(st.sampled_from([None, None, "e", "the"])),
        abort_after=draw(st.none() | st.none() | st.integers(0, 20)),
    )


def crowds() -> st.SearchStrategy[list[Wish]]:
    """Requests whose prompts fit the KV cache together, but not their generated tokens.

    It has nine blocks of 32 tokens: four prompts of two blocks, then four of three.
    """
    long = wishes(lengths=[33, 60, 64], outputs=[40])
    return st.tuples(st.lists(long, min_size=4, max_size=6), st.lists(wishes())).map(
        lambda drawn: (drawn[0] + drawn[1])[:8]
    )


class Bench:
    """The engine, and the library's models for its requests."""

    def __init__(
        self, engine: CapturedEngine, adapted: Reference, lora: LoRARequest | None
    ) -> None:
        self.engine, self.lora = engine, lora
        self.models = {False: engine.reference, True: adapted}
        self.serial = 0
        core: Any = engine.llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        self._preempt = Mock(wraps=scheduler._preempt_request)
        scheduler._preempt_request = self._preempt

    @property
    def preemptions(self) -> int:
        return int(self._preempt.call_count)

    def adapted(self, wish: Wish) -> bool:
        return wish.special and self.lora is not None

    def embedded(self, wish: Wish) -> bool:
        return wish.special and self.lora is None

    def given(self, wish: Wish) -> Any:
        if not self.embedded(wish):
            return {"prompt_token_ids": wish.prompt}
        table = self.models[False].model.get_input_embeddings().weight
        return {"prompt_embeds": table[wish.prompt].detach().clone()}

    def stream(self, wish: Wish, fed: list[int]) -> Stream:
        """The rows of all positions, computed by the library."""
        reference = self.models[self.adapted(wish)]
        with changing(reference.model.model.layers[1], partial(steered, wish=wish)):
            return reference.stream(fed)


def vectors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(900 + number)
    prefill, decode = torch.randn(2, WIDTH, generator=generator)
    return prefill, decode


def steered(stream: torch.Tensor, wish: Wish) -> torch.Tensor:
    if wish.steered is None:
        return stream
    prefill, decode = vectors(wish.steered)
    stream = stream.clone()
    stream[:, : wish.length] += prefill
    stream[:, wish.length :] += decode
    return stream


@pytest.fixture(scope="module", params=["sync", "async", "embeds", "embeds-async"])
def bench(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("adapter")
    adapted = adapter(model, folder)
    # Separate batches: upstream's embedding layer fails on a CPU if a batch has both.
    # It embeds the tokens alone, with the adapters' indices of all rows.
    embeds, ahead = "embeds" in request.param, "async" in request.param
    # With one adapter at most, upstream's CPU kernels apply it to all requests.
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
    with asynchronous.allowed():
        engine = CapturedEngine(
            model,
            max_num_batched_tokens=24,
            max_model_len=128,
            num_gpu_blocks_override=10,
            enable_prompt_embeds=embeds,
            enable_steering=True,
            max_steering_configs=2,
            async_scheduling=ahead,
            **({} if embeds else lora),
        )
    yield Bench(
        engine, adapted, None if embeds else LoRARequest("adapted", 1, str(folder))
    )
    engine.close()


# An engine that failed has requests in flight: no example can be reduced with it.
@settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])
@given(st.lists(wishes(), min_size=1, max_size=8))
def test_rows_do_not_depend_on_what_shares_the_batch(
    bench: Bench, batch: list[Wish]
) -> None:
    generate_and_check(bench, batch)


def test_rows_do_not_depend_on_what_is_preempted(bench: Bench) -> None:
    before = bench.preemptions

    @settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])
    @given(crowds())
    def among_preempted(batch: list[Wish]) -> None:
        generate_and_check(bench, batch)

    among_preempted()
    assert bench.preemptions > before, "the test is pointless without a preemption"


def generate_and_check(bench: Bench, batch: list[Wish]) -> None:
    before = bench.preemptions
    running = [Running(bench, wish) for wish in batch]
    outputs = drive(bench.engine.llm.llm_engine, running)
    event(f"preemptions: {min(bench.preemptions - before, 3)}")
    for one in running:
        output = outputs.get(one.name)
        for sample in range(one.wish.samples):
            check(bench, one, output, sample)


class Running:
    """A request in flight."""

    def __init__(self, bench: Bench, wish: Wish) -> None:
        bench.serial += 1
        self.name, self.wish = f"any-{bench.serial}", wish
        asked = asking(
            wish.positions,
            HOOKS,
            wish.max_tokens,
            n=wish.samples,
            temperature=1.0 if wish.samples > 1 else 0.0,
            stop=[wish.stop] if wish.stop else None,
        )
        if wish.steered is not None:
            prefill, decode = vectors(wish.steered)
            asked.prefill_steering_vectors = {"pre_attn": {1: prefill}}
            asked.decode_steering_vectors = {"pre_attn": {1: decode}}
        core: Any = bench.engine.llm.llm_engine
        core.add_request(
            self.name,
            bench.given(wish),
            asked,
            lora_request=bench.lora if bench.adapted(wish) else None,
        )
        states = core.output_processor.request_states.values()
        ids = [one.residual.capture_id for one in states]
        self.capture_id = next(one for one in ids if one.startswith(self.name))
        self.tokens: dict[int, list[int]] = {}
        self.aborted = False


def drive(engine: Any, running: list[Running]) -> dict[str, Any]:
    """Step until all have ended; returns the last outputs without aborted ones."""
    by_name, finished, steps = {one.name: one for one in running}, {}, 0
    while engine.has_unfinished_requests():
        for one in running:
            if one.wish.abort_after == steps and one.name not in finished:
                engine.abort_request([one.name])
                one.aborted = True
        for output in engine.step():
            one = by_name[output.request_id]
            for sample in output.outputs:
                one.tokens[sample.index] = list(sample.token_ids)
            if output.finished:
                finished[one.name] = output
        steps += 1
        assert steps < MOST_STEPS, "the requests do not come to their end"
    waiting: list[Any] = [
        SimpleNamespace(
            request_id=one.name,
            capture_id=one.capture_id,
            # Results that had come by the last step are in its output, and only there.
            capture_results=getattr(finished.get(one.name), "capture_results", None),
        )
        for one in running
    ]
    engine.capture.wait(waiting)
    return {output.request_id: output for output in waiting}


def check(bench: Bench, one: Running, output: Any, sample: int) -> None:
    wish, tokens = one.wish, one.tokens.get(sample, [])
    fed = [*wish.prompt, *tokens]
    stop = max(len(fed) - 1, 0) if tokens else wish.length
    wanted = selected(wish, stop)
    status = output.capture_results["keeper"].status
    rows = bench.engine.keeper.rows.get((one.name, sample), {})
    if not one.aborted:
        assert status == ("ok" if reached(one) else "partial_error"), (wish, tokens)
        assert len(rows) == 5
    if status == "error":
        assert one.aborted and not rows
        return
    expected = bench.stream(wish, fed)
    for tap, found in rows.items():
        sidecar = bench.engine.keeper.sidecars[one.name, sample][tap]
        positions = sidecar["positions"]
        # An abort may happen before all of the prompt is computed, and is reported so.
        assert positions == wanted[: len(positions)]
        assert len(positions) == len(wanted) or (
            one.aborted and "capture_note" in sidecar
        )
        if bench.embedded(wish):
            known = [fed[p] if p >= wish.length else None for p in positions]
        else:
            known = [fed[p] for p in positions]
        assert sidecar["token_ids"] == known
        assert relative_error(found, expected[tap][positions]) < 1e-4, (wish, tap)


def reached(one: Running) -> bool:
    """Whether every sample has a row for every listed position."""
    listed = one.wish.positions if isinstance(one.wish.positions, list) else []
    fed = min(len(tokens) for tokens in one.tokens.values()) + one.wish.length - 1
    return all(position < fed for position in listed)


def selected(wish: Wish, stop: int) -> list[int]:
    named = {
        "all": range(stop),
        "all_prompt": range(wish.length),
        "all_generated": range(wish.length, stop),
        "last_prompt": [wish.length - 1],
    }
    if isinstance(wish.positions, str):
        return list(named[wish.positions])
    return [p for p in wish.positions if p < stop]
