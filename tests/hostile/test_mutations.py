# SPDX-License-Identifier: Apache-2.0
"""Thousands of mutated bodies are served or refused without delaying others."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.hostile.client import Client, Watch, watching
from tests.hostile.mutations import RIGHT, SMALL, mutations
from tests.support.server import Server
from vllm.entrypoints.serve.steering.authority import MUTATING

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GOOD = SMALL | {"prompt": [20, 30, 40], "max_tokens": 6, "logprobs": 1}


def survive(server: Server, client: Client, steerer: Client, count: int) -> Watch:
    """Send bodies and check that nothing changed; returns the times of `/health`."""
    before = client.post("/v1/completions", GOOD).body["choices"]

    def send(one: tuple[str, bytes]) -> None:
        path, raw = one
        sender = steerer if path in MUTATING else client
        reply = sender.send("POST", path, raw)
        assert reply.status < 500, (path, raw[:2000], reply)
        if "/interp-engine/" not in path:  # They return as many rows as are asked for.
            assert len(str(reply.body)) < 200_000, (path, raw[:500])
        if reply.status >= 400:
            assert reply.status in (400, 404, 413, 415, 422), (path, raw[:500], reply)
            assert len(str(reply.body)) < 20_000, (path, raw[:500])

    with watching(server) as watch:
        at_once(mutations(seed=count, count=count), send)
    assert steerer.post("/v1/steering/clear", {}).status == 200
    for name in client.get("/v1/steering/modules").body["modules"]:
        told = steerer.post("/v1/steering/modules/unregister", {"name": name})
        assert told.status == 200, told
    after = client.post("/v1/completions", GOOD)
    assert after.status == 200 and after.body["choices"] == before
    counters = client.get("/v1/capture").body["counters"]
    assert counters["requests_in_flight"] == 0
    return watch


def at_once(
    bodies: Iterator[tuple[str, bytes]], send: Callable[[tuple[str, bytes]], None]
) -> None:
    """Send bodies, four at a time."""
    lock = threading.Lock()

    def send_all(_: int) -> None:
        while True:
            with lock:  # Created one at a time: together they take gigabytes.
                one = next(bodies, None)
            if one is None:
                return
            send(one)

    with ThreadPoolExecutor(4) as senders:
        list(senders.map(send_all, range(4)))


def test_what_is_mutated_is_accepted(client: Client, steerer: Client) -> None:
    for path, body in RIGHT:
        sender = steerer if path in MUTATING else client
        reply = sender.post(path, body)
        missing = any(word in str(reply.body) for word in ("/none", "no hook 'none'"))
        unknown = path.endswith("readouts/modules/unregister")
        assert reply.status == 200 or missing or unknown, (path, reply)
    assert steerer.post("/v1/steering/clear", {}).status == 200


def test_some_hundred_mutated_bodies(
    attacked: Server, client: Client, steerer: Client
) -> None:
    survive(attacked, client, steerer, 300)


@pytest.mark.hostile
@pytest.mark.timeout(1800)
def test_five_thousand_mutated_bodies(
    attacked: Server, client: Client, steerer: Client
) -> None:
    watch = survive(attacked, client, steerer, 5000)
    print(
        f"/health: {len(watch.waits)} asked, worst {max(watch.waits):.3f} s, of which "
        f"the server ran {max(watch.owned):.3f}, blocked for {max(watch.blocked):.3f}"
    )
    assert max(watch.owned) <= 0.25
    assert max(watch.blocked) <= 0.25
