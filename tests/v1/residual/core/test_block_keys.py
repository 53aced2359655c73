# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from vllm.v1.residual.core import block_keys
from vllm.v1.residual.core.scheduler import NO_SCHEDULING
from vllm.v1.steering.core.prefix_cache import EngineSteering

BLOCK = 4


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    init_none_hash(sha256)
    EngineSteering.begin()
    block_keys.Weights.begin()
    yield
    block_keys.Weights.begin()


def request(adapter: str | None = None, name: str = "r") -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(3 * BLOCK)),
        sampling_params=SamplingParams(),
        pooling_params=None,
        lora_request=None
        if adapter is None
        else LoRARequest(adapter, 1, f"/{adapter}"),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def scheduler(*running: Request) -> Any:
    requests = {one.request_id: one for one in running}
    return SimpleNamespace(requests=requests, hash_block_size=BLOCK)


def test_a_first_load_adds_no_key() -> None:
    before = request("a").block_hashes
    block_keys.note_adapter(scheduler(), "a")
    assert request("a").block_hashes == before


def test_a_running_request_shares_no_block_that_follows_a_change() -> None:
    one, other = request(name="1"), request(name="2")
    old = list(one.block_hashes)
    one.num_computed_tokens = other.num_computed_tokens = BLOCK
    block_keys.note_weights(scheduler(one, other))
    assert one.block_hashes[0] == other.block_hashes[0] == old[0]
    rest = [set(x.block_hashes[1:]) for x in (one, other, request())]
    assert not rest[0] & rest[1] and not rest[0] & rest[2] and not rest[0] & set(old)


def test_a_change_of_an_adapter_leaves_requests_without_it_alone() -> None:
    plain = request()
    plain.num_computed_tokens = BLOCK
    old = list(plain.block_hashes)
    for _ in range(2):
        block_keys.note_adapter(scheduler(plain), "a")
    assert plain.block_hashes == old


@pytest.mark.parametrize("adapter", [None, "a"])
def test_a_request_on_its_way_during_a_change_is_hashed_again(
    adapter: str | None,
) -> None:
    for _ in range(2):
        waiting = request(adapter)
        block_keys.note_weights(scheduler())
        stale = list(waiting.block_hashes)
        NO_SCHEDULING.add_request(waiting)
        assert waiting.block_hashes != stale
        assert waiting.block_hashes == request(adapter).block_hashes
