# SPDX-License-Identifier: Apache-2.0
"""A multimodal model: rows of an image's tokens, and their steering."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import changing
from tests.support.pictures import (
    IMAGE_TOKENS,
    WIDTH,
    PictureReference,
    blip,
    picture,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CapturedEngine]:
    folder = blip(tmp_path_factory.mktemp("blip"))
    engine = CapturedEngine(
        folder,
        reference=PictureReference(folder),
        enable_patching=True,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_model_len=128,
    )
    yield engine
    engine.close()


def ask(engine: CapturedEngine, texts: Any, pictures: Any, params: Any) -> Any:
    given = [
        {"prompt_token_ids": text}
        | ({} if seed is None else {"multi_modal_data": {"image": picture(seed)}})
        for text, seed in zip(texts, pictures, strict=True)
    ]
    return engine.llm.generate(given, params, use_tqdm=False)


def check(engine: CapturedEngine, output: Any, seed: int | None, **wanted: Any) -> None:
    reference: Any = engine.reference
    reference.picture = None if seed is None else picture(seed)
    engine.check(output, **wanted)


def check_changed(engine: CapturedEngine, output: Any, change: Any) -> None:
    """Picture 5's rows are those with the change in layer 1, and no others."""
    reference: Any = engine.reference
    with changing(reference.layers[1], change):
        check(engine, output, 5)
    with pytest.raises(AssertionError):
        check(engine, output, 5)


@pytest.mark.parametrize("positions", ["all", [0, 3, 4, 9]])
def test_rows_of_pictures_and_text_are_those_of_the_library(
    seeing: CapturedEngine, positions: Any
) -> None:
    texts = [prompt(6, seed=1), prompt(40, seed=2), prompt(6, seed=1)]
    seeds = [7, None, 8]
    outputs = ask(seeing, texts, seeds, asking(positions, max_tokens=6))
    for output, text, seed in zip(outputs, texts, seeds, strict=True):
        images = 0 if seed is None else IMAGE_TOKENS
        assert len(output.prompt_token_ids) == len(text) + images
        wanted = None if positions == "all" else positions
        check(seeing, output, seed, positions=wanted)
    with pytest.raises(AssertionError):
        check(seeing, outputs[0], seed=9)


def test_a_vector_acts_on_a_pictures_tokens(seeing: CapturedEngine) -> None:
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3))
    asked = asking("all", max_tokens=4)
    asked.prefill_steering_vectors = {"pre_attn": {1: vector}}
    text = prompt(5, seed=3)
    (output,) = ask(seeing, [text], [5], asked)
    prompt_length = len(text) + IMAGE_TOKENS

    def changed(stream: torch.Tensor) -> torch.Tensor:
        stream = stream.clone()
        stream[:, :prompt_length] += vector
        return stream

    check_changed(seeing, output, changed)


def test_a_row_of_another_picture_is_patched_in(seeing: CapturedEngine) -> None:
    text, place = prompt(5, seed=4), {"layer": 1, "hook": "pre_attn"}
    spec = {"run": "other", "hooks": {place["hook"]: [place["layer"]]}}
    kept = asking(None, max_tokens=1)
    kept.capture, kept.capture_wait = {"patch_source": spec}, True
    ask(seeing, [text], [9], kept)
    (run,) = seeing.llm.captured("other", instance="patch_source")
    asked = asking("all", max_tokens=4)
    source = {"source_run": "other", "source_position": 2}
    asked.patch = [{**place, "dest_position": 2, **source}]
    (output,) = ask(seeing, [text], [5], asked)

    def changed(stream: torch.Tensor) -> torch.Tensor:
        stream = stream.clone()
        stream[:, 2] = run.rows[1, "pre_attn"][2]
        return stream

    check_changed(seeing, output, changed)


def test_the_same_picture_again_is_found_in_the_cache(seeing: CapturedEngine) -> None:
    text = prompt(70, seed=4)
    first, second, other = (
        ask(seeing, [text], [seed], asking("last_prompt", max_tokens=2))[0]
        for seed in (11, 11, 12)
    )
    assert (second.num_cached_tokens, other.num_cached_tokens) == (64, 0)
    for output, seed in ((first, 11), (second, 11), (other, 12)):
        check(seeing, output, seed, positions=[len(text) + IMAGE_TOKENS - 1])
