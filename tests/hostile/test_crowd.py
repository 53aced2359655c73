# SPDX-License-Identifier: Apache-2.0
"""Each request gets its result alone, whatever other clients send."""

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from urllib.parse import urlsplit

import pytest

from tests.hostile.client import Client
from tests.hostile.crowd import Ask, Seen, difference, requests
from tests.hostile.memory import growth, used
from tests.hostile.mutations import mutations
from tests.support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOLERANCE = 1e-5
ROUNDS = 10
WARM_UP = 5
"""Rounds before the first measurement: caches of vectors and of messages fill."""
GROWTH = 6 << 20
"""Bytes by which the memory in use of all processes may grow over `ROUNDS`, 3 KiB
for each of 2,000 requests."""
BLOCKS = 40_000
"""Small Python objects, likewise: 20 for each request."""


class Customer:
    """Sends requests, and repeats those refused for lack of room."""

    def __init__(self, server: Server, key: str) -> None:
        where = urlsplit(server.url)
        self._address = where.hostname or "", where.port
        self._headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {key}",
        }

    def alone(self, ask: Ask) -> Seen:
        """The result of a request alone, read to the end."""
        return self.send(Ask(ask.body, None))

    def send(self, ask: Ask) -> Seen:
        """Send a request; returns its result."""
        deadline = monotonic() + 300
        while True:
            connection = http.client.HTTPConnection(*self._address, timeout=300)
            try:
                raw = json.dumps(ask.body)
                connection.request("POST", "/v1/completions", raw, self._headers)
                reply = connection.getresponse()
                if reply.status == 200:
                    seen = self._read(reply, ask)
                    if seen is not None:
                        return seen
                else:
                    told = reply.read().decode()
                    assert "max_inflight_bytes" in told, (told, ask.body)
            finally:
                connection.close()
            assert monotonic() < deadline, "there is never room"
            sleep(0.1)

    def _read(self, reply: http.client.HTTPResponse, ask: Ask) -> Seen | None:
        """None if a stream was refused for lack of room."""
        seen = Seen()
        if not ask.body["stream"]:
            seen.take(json.load(reply))
            return seen
        chunks = 0
        for line in reply:
            text = line.decode().removeprefix("data: ").strip()
            if not text or text == "[DONE]":
                continue
            chunk = json.loads(text)
            if "error" in chunk:
                assert "max_inflight_bytes" in text, (text, ask.body)
                return None
            seen.take(chunk)
            chunks += 1
            if chunks == ask.hang_up:
                break
        return seen


@contextmanager
def hostile_client(client: Client, stranger: Client, seed: int) -> Iterator[list[int]]:
    """Send mutated bodies meanwhile; returns their statuses.

    It has no steering key, with which it could change the steering of others.
    """
    statuses: list[int] = []
    done = threading.Event()

    def attack() -> None:
        for path, raw in mutations(seed, 1 << 20):
            if done.is_set():
                return
            sender = stranger if path.startswith("/v1/steering") else client
            # A client without a key is answered before all of a large body is sent.
            with suppress(OSError):
                statuses.append(sender.send("POST", path, raw).status)

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    try:
        yield statuses
    finally:
        done.set()
        thread.join(timeout=120)


def crowd(customer: Customer, asks: list[Ask]) -> list[Seen]:
    """Send all requests concurrently."""
    with ThreadPoolExecutor(len(asks)) as senders:
        return list(senders.map(customer.send, asks))


def check(asks: list[Ask], found: list[Seen], alone: list[Seen]) -> float:
    """Compare all results; returns the largest difference."""
    worst = 0.0
    for ask, one, other in zip(asks, found, alone, strict=True):
        apart = difference(one, other, ask.hang_up is not None)
        assert apart <= TOLERANCE, (apart, ask)
        worst = max(worst, apart)
    return worst


@pytest.fixture
def customer(attacked: Server, api_key: str) -> Customer:
    return Customer(attacked, api_key)


def test_a_small_crowd_gets_what_each_gets_alone(
    customer: Customer, client: Client, stranger: Client
) -> None:
    asks = requests(seed=24, count=24)
    with hostile_client(client, stranger, seed=24):
        found = crowd(customer, asks)
    check(asks, found, [customer.alone(ask) for ask in asks])


@pytest.mark.hostile
@pytest.mark.timeout(3600)
def test_two_thousand_get_what_each_gets_alone_and_memory_is_flat(
    attacked: Server, customer: Customer, client: Client, stranger: Client
) -> None:
    asks = requests(seed=200, count=200)
    alone = [customer.alone(ask) for ask in asks]
    worst, memory = 0.0, []
    for seed in range(WARM_UP + ROUNDS):
        with hostile_client(client, stranger, seed) as statuses:
            found = crowd(customer, asks)
        worst = max(worst, check(asks, found, alone))
        assert all(status < 500 for status in statuses)
        sleep(2)  # for what ends after the last response
        memory.append(used(attacked))
    counters = client.get("/v1/capture").body["counters"]
    assert counters["requests_in_flight"] == 0
    grown = growth(memory[WARM_UP:])
    print(f"worst {worst:.1e}; {grown}")
    print(f"MiB by round {[round(one.bytes / 2**20, 1) for one in memory]}")
    print(f"objects by round {[one.blocks for one in memory]}")
    assert grown.bytes < GROWTH
    assert grown.blocks < BLOCKS
