# SPDX-License-Identifier: Apache-2.0
"""A cached block has no rows: reuse ends where captured prompt rows begin."""

from typing import Any

import pytest

from tests.support.captured import CapturedEngine, asking, prompt

pytestmark = pytest.mark.e2e


def twice(
    engine: CapturedEngine, length: int, seed: int, positions: Any
) -> tuple[Any, Any]:
    first = engine.run([prompt(length, seed)], asking(positions, max_tokens=2))[0]
    second = engine.run([prompt(length, seed)], asking(positions, max_tokens=2))[0]
    return first, second


def test_a_repeated_prompt_has_the_same_rows(engine: CapturedEngine) -> None:
    first, second = twice(engine, 100, 100, "all")
    assert second.num_cached_tokens == 0
    engine.check(first)
    engine.check(second)


def test_the_last_prompt_position_keeps_the_reuse(engine: CapturedEngine) -> None:
    first, second = twice(engine, 100, 101, "last_prompt")
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 96
    engine.check(first, [99])
    engine.check(second, [99])


def test_a_position_in_the_middle_keeps_the_blocks_below_it(
    engine: CapturedEngine,
) -> None:
    _, second = twice(engine, 100, 102, [70, 99])
    assert second.num_cached_tokens == 64
    engine.check(second, [70, 99])


def test_generated_positions_keep_all_of_the_reuse(engine: CapturedEngine) -> None:
    _, second = twice(engine, 100, 103, "all_generated")
    assert second.num_cached_tokens == 96
    engine.check(second, [100])


def test_what_capture_computed_again_is_cached_as_before(
    engine: CapturedEngine,
) -> None:
    twice(engine, 100, 104, "all")
    (third,) = engine.run([prompt(100, 104)], asking("all_generated", max_tokens=2))
    assert third.num_cached_tokens == 96
