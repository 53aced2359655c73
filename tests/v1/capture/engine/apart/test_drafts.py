# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: rows of accepted tokens, none of rejected drafts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.captured import CapturedEngine, asking, prompt

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[CapturedEngine]:
    engine = CapturedEngine(
        model,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("positions", ["all", "all_generated"])
def test_rows_with_drafts_are_the_rows_without(
    drafting: CapturedEngine, positions: str
) -> None:
    # Prompts that repeat themselves, so that drafts are proposed.
    prompts = [prompt(6, seed=400 + i) * 5 for i in range(4)]
    for output in drafting.run(prompts, asking(positions, max_tokens=24)):
        start = 0 if positions == "all" else 30
        drafting.check(output, range(start, 53))
