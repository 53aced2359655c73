# SPDX-License-Identifier: Apache-2.0
"""A request whose stream overflows changes no bit of another one's output.

There are few blocks, so that every request gets blocks that hostile ones have used.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import GRAPHS, OpenEngine
from tests.support.captured import CapturedEngine, prompt
from vllm import SamplingParams, envs
from vllm.v1.residual import nonfinite_streams

pytestmark = pytest.mark.gpu

WIDTH = 512
LARGE = {"bfloat16": 3e38, "float16": 6e4}
VICTIMS = [prompt(length, seed=90 + length) for length in (5, 17, 33, 40, 61)]
HOSTILE = [prompt(61, seed=1 + number) for number in range(3)]
RUNNERS = {"V2": "1", "V1": "0"}
Answer = tuple[tuple[int, ...], list[float]]


@pytest.fixture(
    scope="module",
    params=[
        *(("V2", dtype, way) for dtype in LARGE for way in ("full", "eager")),
        *(("V1", dtype, "full") for dtype in LARGE),
    ],
    ids=", ".join,
)
def opened(
    request: pytest.FixtureRequest, llama: Path, open_engine: OpenEngine
) -> Iterator[tuple[CapturedEngine, float]]:
    runner, dtype, way = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
        envs.disable_envs_cache()
        options: dict[str, Any] = {
            "dtype": dtype,
            "num_gpu_blocks_override": 24,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "enable_prompt_embeds": True,
            # Else a request that is lost has a row in one more step than a short one.
            "async_scheduling": False,
        }
        engine = open_engine(llama, reference=object(), **options, **GRAPHS[way])
        yield engine, LARGE[dtype]
    envs.disable_envs_cache()


def plain() -> SamplingParams:
    return SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0, detokenize=False
    )


def overflowing(large: float, *layers: int) -> SamplingParams:
    vector = torch.full((WIDTH,), large)
    return SamplingParams(
        max_tokens=6,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        steering_vectors={"post_block": dict.fromkeys(layers, vector)},
    )


def answer(output: Any) -> Answer:
    """Tokens and log-probabilities, with all bits."""
    (sample,) = output.outputs
    numbers = [next(iter(one.values())).logprob for one in sample.logprobs]
    return tuple(sample.token_ids), numbers


def answers(engine: CapturedEngine) -> list[Answer]:
    engine.llm.reset_prefix_cache()
    return [answer(output) for output in engine.run(VICTIMS, plain())]


def check_lost(outputs: list[Any]) -> None:
    for output in outputs:
        (sample,) = output.outputs
        assert sample.finish_reason == "error", sample
        assert str(sample.stop_reason).startswith(nonfinite_streams.MARK)


def test_an_infinite_stream_leaves_nothing_to_later_requests(
    opened: tuple[CapturedEngine, float],
) -> None:
    engine, large = opened
    before = answers(engine)
    for layers in ((0, 1), (2, 3)):
        check_lost(engine.run(HOSTILE, overflowing(large, *layers)))
        assert answers(engine) == before, layers


def test_requests_beside_an_infinite_stream_have_the_same_bits(
    opened: tuple[CapturedEngine, float],
) -> None:
    engine, large = opened
    prompts = [*VICTIMS[:2], HOSTILE[0], *VICTIMS[2:], HOSTILE[1]]

    def beside(other: SamplingParams) -> list[Any]:
        engine.llm.reset_prefix_cache()
        params = [plain(), plain(), other, plain(), plain(), plain(), other]
        return engine.run(prompts, params)

    finite = overflowing(1e-3, 0, 1)
    finite.max_tokens = 1  # It ends in the step in which the other one is lost.
    usual, found = beside(finite), beside(overflowing(large, 0, 1))
    check_lost([found[2], found[6]])
    for number in (0, 1, 3, 4, 5):
        assert answer(found[number]) == answer(usual[number]), number


def test_infinite_embeddings_leave_nothing_to_later_requests(
    opened: tuple[CapturedEngine, float],
) -> None:
    engine, _ = opened
    before = answers(engine)
    dtype = engine.llm.llm_engine.model_config.dtype
    for number in (float("inf"), float("nan")):
        embeds = torch.full((61, WIDTH), number, dtype=dtype)
        hostile: Any = [{"prompt_embeds": embeds}] * 2
        check_lost(engine.llm.generate(hostile, plain(), use_tqdm=False))
        assert answers(engine) == before, number
