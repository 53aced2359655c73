# SPDX-License-Identifier: Apache-2.0
"""Thousands of mutated bodies are served or refused without delaying others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest

from tests.hostile.client import Client, watching
from tests.hostile.mutations import SMALL, mutations
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GOOD = SMALL | {"prompt": [20, 30, 40], "max_tokens": 6, "logprobs": 1}


def survive(server: Server, client: Client, steerer: Client, count: int) -> list[float]:
    """Send bodies and check that nothing changed; returns the times of `/health`."""
    before = client.post("/v1/completions", GOOD).body["choices"]

    def send(one: tuple[str, bytes]) -> None:
        path, raw = one
        sender = steerer if path.startswith("/v1/steering") else client
        reply = sender.send("POST", path, raw)
        assert reply.status < 500, (path, raw[:2000], reply)
        assert len(str(reply.body)) < 200_000, (path, raw[:500])
        if reply.status >= 400:
            assert reply.status in (400, 404, 413, 415), (path, raw[:500], reply)
            assert len(str(reply.body)) < 20_000, (path, raw[:500])

    bodies, lock = mutations(seed=count, count=count), threading.Lock()

    def send_all(_: int) -> None:
        while True:
            with lock:  # Created one at a time: together they take gigabytes.
                one = next(bodies, None)
            if one is None:
                return
            send(one)

    with watching(server) as waits, ThreadPoolExecutor(4) as senders:
        list(senders.map(send_all, range(4)))
    assert steerer.post("/v1/steering/clear", {}).status == 200
    for name in client.get("/v1/steering/modules").body["modules"]:
        told = steerer.post("/v1/steering/modules/unregister", {"name": name})
        assert told.status == 200, told
    after = client.post("/v1/completions", GOOD)
    assert after.status == 200 and after.body["choices"] == before
    counters = client.get("/v1/capture").body["counters"]
    assert counters["requests_under_way"] == 0
    return waits


def test_some_hundred_mutated_bodies(
    attacked: Server, client: Client, steerer: Client
) -> None:
    survive(attacked, client, steerer, 300)


@pytest.mark.hostile
@pytest.mark.timeout(1800)
def test_five_thousand_mutated_bodies(
    attacked: Server, client: Client, steerer: Client
) -> None:
    with watching(attacked) as idle:
        sleep(20)
    waits = survive(attacked, client, steerer, 5000)
    print(
        f"/health: {len(waits)} asked, worst {max(waits):.3f} s, idle {max(idle):.3f}"
    )
    # Delays that the machine causes on an idle server are subtracted.
    assert max(waits) <= 0.25 + max(idle)
