# SPDX-License-Identifier: Apache-2.0
"""A change of the global vectors applies on all data-parallel engines or on none."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.v1.steering._ranks import WIDTH, Client, Core, control
from vllm.v1.steering.core.engine import refuses
from vllm.v1.steering.core.prefix_cache import EngineSteering
from vllm.v1.steering.errors import SteeringChangeError, SteeringValidationError
from vllm.v1.steering.frontend import dp_engines
from vllm.v1.steering.frontend.dp_engines import Engines
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, pack

HUGE = 2e38
"""Twice this value overflows float32."""


@pytest.fixture
def cores() -> Iterator[list[Core]]:
    yield [Core(), Core(), Core()]
    EngineSteering.set(NO_STEERING)


def tiers(value: float, layer: int = 0) -> SteeringTiers:
    vector = np.full(WIDTH, value, np.float32)
    return SteeringTiers(base=pack({(layer, "post_block"): vector}))


def request(value: float) -> Any:
    params = SimpleNamespace(_steering=tiers(value))
    return SimpleNamespace(
        sampling_params=params, num_computed_tokens=0, request_id="r", client_index=0
    )


def steered_by(cores: list[Core]) -> list[SteeringTiers]:
    assert all(core.scheduler.residual.steering.held is None for core in cores), (
        "still held"
    )
    return [core.scheduler.residual.steering.tiers for core in cores]


def test_every_engine_has_it_and_one_answer_tells_of_all(cores: list[Core]) -> None:
    client = Client(*cores)
    cores[1].scheduler.residual.steering.slots.acquire("r", "digest")
    told = asyncio.run(Engines(client).set(tiers(1), False))
    assert steered_by(cores) == [tiers(1)] * 3
    assert told == asyncio.run(Engines(client).get())
    assert told["configs_in_use"] == 1 and told["rows_in_use"] == 4
    assert cores[0].content() == cores[2].content()
    # The owner is asked first and released last.
    assert client.calls[0] == (0, "hold_steering")
    freed = [engine for engine, method in client.calls if method == "release_steering"]
    assert freed == [1, 2, 0]


@pytest.mark.parametrize("busy", range(3))
def test_a_request_at_one_engine_refuses_it_for_all(
    cores: list[Core], busy: int
) -> None:
    asyncio.run(Engines(Client(*cores)).set(tiers(1, layer=1), False))
    before = [core.content() for core in cores]
    cores[busy].scheduler.requests["r"] = request(HUGE)
    with (
        patch("vllm.v1.steering.core.prefix_cache.rehash"),
        pytest.raises(SteeringValidationError, match="in flight") as raised,
    ):
        asyncio.run(Engines(Client(*cores)).set(tiers(HUGE), False))
    assert raised.value.parameter == "vectors"
    assert steered_by(cores) == [tiers(1, layer=1)] * 3
    assert [core.content() for core in cores] == before


@pytest.mark.parametrize("faulty", range(3))
def test_a_rank_that_cannot_take_it_undoes_it_everywhere(
    cores: list[Core], faulty: int
) -> None:
    client = Client(*cores)
    asyncio.run(Engines(client).set(tiers(1), False))
    before = [core.content() for core in cores]
    cores[faulty].ranks[1].fails = True
    with pytest.raises(SteeringChangeError, match="no rank has changed"):
        asyncio.run(Engines(client).set(tiers(2, layer=1), False))
    assert steered_by(cores) == [tiers(1)] * 3
    assert [core.content() for core in cores] == before


def test_an_engine_that_cannot_undo_a_change_is_reported(cores: list[Core]) -> None:
    client = Client(*cores)
    make = dp_engines.Engines._ask

    async def ask(self: Any, some: Any, method: str, args: Any = ()) -> Any:
        cores[0].ranks[0].fails = method == "release_steering"
        return await make(self, some, method, args)

    cores[2].ranks[0].fails = True
    with (
        patch.object(Engines, "_ask", ask),
        pytest.raises(SteeringChangeError, match="differ.*steering/clear"),
    ):
        asyncio.run(Engines(client).set(tiers(1), False))
    for core in cores:
        core.ranks[0].fails = False
    asyncio.run(Engines(client).set(SteeringTiers(), True))
    assert not any(steered_by(cores))


def test_while_it_is_made_requests_must_fit_both(cores: list[Core]) -> None:
    """Otherwise a request could prevent making or undoing the change."""
    (core, *_) = cores
    answered: list[Any] = []
    queue = SimpleNamespace(put_nowait=answered.append)
    core.output_queue = queue  # type: ignore[attr-defined]
    held = Client(core)

    async def hold() -> None:
        await held._call_utility_async("set_steering", tiers(HUGE), True, engine=0)
        args = ("holder", tiers(HUGE, layer=1), True)
        assert await held._call_utility_async("hold_steering", *args, engine=0)
        assert not await held._call_utility_async("hold_steering", *args, engine=0)

    asyncio.run(hold())
    arriving: Any = core
    for layer in (0, 1):
        params = SimpleNamespace(_steering=tiers(HUGE, layer))
        late: Any = SimpleNamespace(
            sampling_params=params, request_id="r", client_index=0
        )
        assert refuses(arriving, late)
    assert len(answered) == 2
    assert not refuses(arriving, request(-1.0))


def test_changes_of_several_servers_are_made_one_after_another(
    cores: list[Core],
) -> None:
    client = Client(*cores)
    servers = [control(client, several=True) for _ in range(4)]

    async def change() -> None:
        changes = [
            server.set(
                {"vectors": {"post_block": {str(layer): [1.0 + n] * WIDTH}}}, False
            )
            for n, server in enumerate(servers)
            for layer in (0, 1)
        ]
        await asyncio.gather(*changes, *(server.clear() for server in servers[:1]))
        await asyncio.gather(
            *(
                server.set({"prefill_vectors": {hook: {"0": [1.0] * WIDTH}}}, False)
                for server, hook in zip(
                    servers, ("pre_attn", "post_attn", "post_block"), strict=False
                )
            )
        )

    with patch.object(dp_engines, "_PAUSE_SECONDS", 0):
        asyncio.run(change())
    first, *others = steered_by(cores)
    assert others == [first] * 2
    assert first.prefill is not None and len(first.prefill.taps) == 3
    states = [asyncio.run(server.get()) for server in servers]
    assert states == [states[0]] * 4


def test_a_change_that_waits_too_long_says_so(cores: list[Core]) -> None:
    client = Client(*cores)

    async def change() -> None:
        args = ("another", tiers(1), False)
        await client._call_utility_async("hold_steering", *args, engine=0)
        with pytest.raises(SteeringChangeError, match="another change.*try again"):
            await Engines(client).set(tiers(2), False)

    with patch.object(dp_engines, "PATIENCE_SECONDS", 0.05):
        asyncio.run(change())
    assert not cores[0].scheduler.residual.steering.tiers


def test_a_change_is_completed_if_its_caller_is_cancelled(
    cores: list[Core],
) -> None:
    async def change() -> None:
        asked = asyncio.create_task(Engines(Client(*cores)).set(tiers(1), False))
        await asyncio.sleep(0)
        asked.cancel()
        for _ in range(100):
            await asyncio.sleep(0)

    asyncio.run(change())
    assert steered_by(cores) == [tiers(1)] * 3
