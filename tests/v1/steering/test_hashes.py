# SPDX-License-Identifier: Apache-2.0
"""Keys of steered blocks are equal in every process, whatever its hash seed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from vllm.v1.steering.core.generated_blocks import note_step, sharable
from vllm.v1.steering.core.prefix_cache import EngineSteering, extra_keys
from vllm.v1.steering.plan import (
    NO_STEERING,
    PackedVectors,
    SteeringTiers,
    operation,
    pack,
)
from vllm.v1.steering.spec.matrix import row_positions

HOOKS = ("pre_attn", "post_attn", "post_block")


def tiers(seed: int, **operations: Any) -> SteeringTiers:
    draw = np.random.default_rng(seed)
    taps = [(layer, hook) for layer in range(3) for hook in HOOKS]
    vectors = {tap: draw.normal(size=8).astype(np.float32) for tap in taps}
    clamp = operation(
        taps[0], "clamp", vectors[taps[1]], 1.0, (0, 1), False, ((-2, -1), (3, 4))
    )
    prefill = pack(dict(reversed(vectors.items())))
    return SteeringTiers(
        pack(vectors, [clamp]), prefill, pack({taps[2]: vectors[taps[3]]})
    )


def request(steering: SteeringTiers | None, num_prompt: int = 10) -> Any:
    params = SimpleNamespace(_steering=steering, _hooks=None)
    return SimpleNamespace(sampling_params=params, num_prompt_tokens=num_prompt)


def named() -> list[Any]:
    """Digests and keys of blocks in the prompt, across its end, and after it."""
    found: list[Any] = []
    for own, of_engine in ((tiers(1), NO_STEERING), (tiers(1), tiers(2))):
        EngineSteering.set(of_engine)
        blocks = [(0, 4), (4, 8), (8, 12), (12, 16)]
        found += [own.digest, *(extra_keys(request(own), *b) for b in blocks)]
    EngineSteering.set(NO_STEERING)
    return found


def test_names_are_the_same_in_other_processes() -> None:
    code = "import json; from tests.v1.steering.test_hashes import named; "
    done = subprocess.run(
        [sys.executable, "-c", code + "print('named', json.dumps(named()))"],
        env=os.environ | {"PYTHONHASHSEED": "1"},  # that of this process is random
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [ln for ln in done.stdout.splitlines() if ln.startswith("named ")]
    assert json.loads(line.removeprefix("named ")) == json.loads(json.dumps(named()))


def by_row(positions: Any) -> SteeringTiers:
    rows = np.arange(len(positions) * 4, dtype=np.float32).reshape(-1, 4)
    places = row_positions(positions, len(rows), "positions")
    made = [
        operation(
            (0, "post_block"), "replace", rows[order], 1.0, (None, None), False, spans,
            num_rows=len(order),
        )
        for spans, order in places
    ]  # fmt: skip
    return SteeringTiers(PackedVectors((), memoryview(b""), "", tuple(made)))


def test_blocks_with_other_rows_of_a_matrix_have_other_keys() -> None:
    one = extra_keys(request(by_row(list(range(32)))), 16, 32)
    assert one != extra_keys(request(by_row(list(range(8, 40)))), 16, 32)
    assert one == extra_keys(request(by_row(list(range(32)))), 16, 32)
    from_end = by_row(list(range(-64, 0)))
    keys = [extra_keys(request(from_end, size), 0, 16) for size in (32, 48)]
    assert keys[0] != keys[1], "all places of the block have rows, but others"


class Generating:
    """A request with 10 prompt tokens, whose hashes are the keys of its blocks of 4."""

    def __init__(self, request_id: str) -> None:
        self.request_id, self.resumable = request_id, False
        self.sampling_params = SimpleNamespace(_steering=None, _hooks=None)
        self.num_prompt_tokens = self.num_tokens = 10
        self.block_hashes: list[Any] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        for start in range(4 * len(self.block_hashes), self.num_tokens - 3, 4):
            self.block_hashes.append(extra_keys(cast("Any", self), start, start + 4))

    def steps(self, *digests: str, first: int = 1) -> None:
        """Generate a token in each step, in which something acts; `first` begins."""
        for number, digest in enumerate(digests):
            note_step(cast("Any", self), digest, 1 if number else first, 1, 4)
            self.num_tokens += 1
            self.update_block_hashes()


@pytest.fixture
def dynamic() -> Iterator[None]:
    EngineSteering.begin(dynamic=True, told=True)
    yield
    EngineSteering.begin()


def test_blocks_name_what_acted_at_their_tokens(dynamic: None) -> None:
    idle, one, same, other, late = (Generating(name) for name in "abcde")
    idle.steps("", "", "", "", "", "", "")
    one.steps("", "x", "x", "x", "x", "", "")
    same.steps("", "x", "x", "x", "x", "", "")
    other.steps("", "x", "x", "y", "x", "", "")
    late.steps("", "", "x", "x", "x", "", "")
    assert idle.block_hashes[:4] == [[], [], [], []]
    assert one.block_hashes[:4] == same.block_hashes[:4]
    keys = [str(each.block_hashes[2:4]) for each in (idle, one, other, late)]
    assert len(set(keys)) == len(keys)


def test_a_block_is_not_shared_before_all_of_its_steps_are_known(dynamic: None) -> None:
    one = Generating("a")
    one.steps("", "", "")  # The last token, at position 12, is not fed yet.
    assert one.block_hashes[2] == []
    assert [sharable(cast("Any", one), 12, tokens) for tokens in (8, 13)] == [8, 12]
    one.num_tokens += 4  # As if a step's output did not arrive.
    one.update_block_hashes()
    assert one.block_hashes[3] == [("steering-dynamic", "a")]
    assert sharable(cast("Any", one), 16, 17) == 12


def test_what_a_preempted_request_computes_again_is_named_anew(dynamic: None) -> None:
    one = Generating("a")
    one.steps(*["x"] * 8)
    before = list(one.block_hashes[:4])
    assert sharable(cast("Any", one), 8, 18) == 10, "its prompt, and what is found"
    one.steps("", first=10)
    assert one.block_hashes[2] == [] != before[2]
    assert sharable(cast("Any", one), 18, 19) == 18
