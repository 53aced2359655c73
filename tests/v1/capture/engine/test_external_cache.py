# SPDX-License-Identifier: Apache-2.0
"""Tokens loaded from an external cache are not computed, and have no rows."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import outside
from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import changing
from vllm import SamplingParams
from vllm.v1.steering.core import prefix_cache

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.multiprocess]

PLAIN = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
LENGTH = 100
WHOLE_BLOCKS = 96


@pytest.fixture(scope="module")
def stored(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CapturedEngine]:
    transfer = {
        "kv_connector": outside.NAME,
        "kv_connector_module_path": outside.__name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "shared_storage_path": str(tmp_path_factory.mktemp("kv"))
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        known = prefix_cache.BY_BLOCK_HASH | {outside.NAME}
        patch.setattr(prefix_cache, "BY_BLOCK_HASH", known)
        engine = CapturedEngine(
            model,
            kv_transfer_config=transfer,
            enable_prefix_caching=False,
            enable_steering=True,
        )
    yield engine
    engine.close()


@pytest.fixture
def loads(stored: CapturedEngine) -> list[int]:
    """The number of tokens loaded for each request, from now on."""
    core: Any = stored.llm.llm_engine.engine_core
    found: list[int] = core.engine_core.scheduler.connector.loads
    found.clear()
    return found


@pytest.mark.parametrize(
    "positions, expected, loaded",
    [
        ("all", range(LENGTH + 1), 0),
        ([40, 99], [40, 99], 0),
        ("last_prompt", [99], WHOLE_BLOCKS),
        ("all_generated", [100], WHOLE_BLOCKS),
    ],
)
def test_captured_rows_are_computed_and_the_rest_is_loaded(
    stored: CapturedEngine,
    loads: list[int],
    positions: Any,
    expected: Any,
    loaded: int,
) -> None:
    text = prompt(LENGTH, seed=700 + sum(expected))
    stored.run([text], PLAIN)
    stored.run([text], PLAIN)
    (output,) = stored.run([text], asking(positions, max_tokens=2))
    stored.check(output, list(expected))
    assert loads == [0, WHOLE_BLOCKS, loaded]


def test_what_steering_left_is_loaded_for_the_same_steering_alone(
    stored: CapturedEngine, loads: list[int]
) -> None:
    text = prompt(LENGTH, seed=1)
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    spec = {"pre_attn": {1: vector}}

    def ask(**steering: Any) -> Any:
        asked = asking("all_generated", max_tokens=4, **steering)
        return stored.run([text], asked)[0]

    first, plain, later, again, other = (
        ask(prefill_steering_vectors=spec),
        ask(),
        ask(decode_steering_vectors=spec),
        ask(prefill_steering_vectors=spec),
        ask(prefill_steering_vectors={"pre_attn": {1: -vector}}),
    )
    assert loads == [0, 0, WHOLE_BLOCKS, WHOLE_BLOCKS, 0]
    positions = list(range(LENGTH, LENGTH + 3))
    stored.check(plain, positions)
    for output, prefill, decode in (
        (first, vector, 0),
        (again, vector, 0),
        (later, 0, vector),
        (other, -vector, 0),
    ):
        with pytest.raises(AssertionError):
            stored.check(output, positions)
        reference: Any = stored.reference
        steered = partial(_steered, prefill=prefill, decode=decode)
        with changing(reference.model.model.layers[1], steered):
            stored.check(output, positions)


def _steered(stream: torch.Tensor, prefill: Any, decode: Any) -> torch.Tensor:
    parts = stream[:, :LENGTH] + prefill, stream[:, LENGTH:] + decode
    return torch.cat(parts, 1)
