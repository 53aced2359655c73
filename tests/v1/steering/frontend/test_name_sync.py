# SPDX-License-Identifier: Apache-2.0
"""Every API server process resolves a name to its latest registration."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.v1.steering._ranks import WIDTH, Client, Core, control
from vllm.sampling_params import SamplingParams
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.frontend.async_frontend import AsyncSteeringControl
from vllm.v1.steering.frontend.modules import Module

Vectors = dict[str, Any]


def servers(count: int) -> list[AsyncSteeringControl]:
    client = Client(Core())
    return [control(client, several=True) for _ in range(count)]


def raw(value: float) -> Vectors:
    return {"vectors": {"post_block": {"0": [value] * WIDTH}}}


async def norm_of(server: AsyncSteeringControl, name: str) -> float:
    """The norm of the vector of a request with this name."""
    params = SamplingParams(max_tokens=4)
    params.steering_name = name  # type: ignore[attr-defined]
    await server.prepare(params)
    server.frontend.admit(params, 5)
    found: Any = params._steering  # type: ignore[attr-defined]
    return float(found.base.unpack()[0, "post_block"][0])


def test_of_many_at_the_same_time_one_gets_the_name() -> None:
    async def go() -> None:
        several = servers(5)
        asked = [
            server.register("tone", raw(1 + n), False, None)
            for n, server in enumerate(several)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        (taken,) = [n for n, a in enumerate(answers) if not isinstance(a, Exception)]
        refused = [a for a in answers if isinstance(a, Exception)]
        assert all(isinstance(a, SteeringValidationError) for a in refused)
        for server in several:
            assert await norm_of(server, "tone") == 1 + taken

    asyncio.run(go())


def test_modules_of_the_start_can_be_replaced_and_removed_everywhere() -> None:
    async def go() -> None:
        one, other = servers(2)
        for server in (one, other):  # Like `--steering-modules`.
            for name in ("kept", "gone"):
                module, _ = server.frontend.prepare(name, raw(1), None)
                server.frontend.modules.put(name, module)
        await one.unregister("gone")
        await one.register("kept", raw(3), True, None)
        assert list(await other.describe_modules()) == ["kept"]
        assert await norm_of(other, "kept") == 3

    asyncio.run(go())


def test_an_only_server_does_not_ask_for_names() -> None:
    client = Client(Core())
    only = control(client)

    async def go() -> None:
        await only.register("tone", raw(1), False, None)
        assert await norm_of(only, "tone") == 1
        await only.unregister("tone")

    asyncio.run(go())
    assert client.calls == []


def test_requests_without_a_name_do_not_ask_for_names() -> None:
    client = Client(Core())
    one = control(client, several=True)
    asyncio.run(one.prepare(SamplingParams(max_tokens=1)))
    asyncio.run(one.prepare(object()))
    assert client.calls == []


CHANGES = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["register", "replace", "unregister"]),
    st.sampled_from(["a", "b"]),
)


@given(st.lists(CHANGES, max_size=12))
def test_servers_behave_as_one(changes: list[tuple[int, str, str]]) -> None:
    several = servers(3)
    alone = control(Client(Core()))

    async def change(
        server: AsyncSteeringControl, what: str, name: str, value: float
    ) -> str:
        try:
            if what == "unregister":
                await server.unregister(name)
            else:
                await server.register(name, raw(value), what == "replace", None)
        except SteeringValidationError as error:
            return str(error)
        return "done"

    async def go() -> None:
        for number, (server, what, name) in enumerate(changes):
            order = (what, name, 1.0 + number)
            assert await change(several[server], *order) == await change(alone, *order)
        expected = await alone.describe_modules()
        for one in several:
            assert await one.describe_modules() == expected

    asyncio.run(go())


def test_what_a_module_is_survives_the_way() -> None:
    import msgspec

    frontend: Any = control(Client(Core())).frontend
    full = raw(1) | {
        "decode_vectors": {
            "pre_attn": {"1": {"vector": [1.0, 2, 3, 4], "op": "clamp", "max": 1}}
        }
    }
    module, _ = frontend.prepare("tone", full, {"origin": "somewhere"})
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(module), type=Module)
    assert again == module and again.tiers.digest == module.tiers.digest
