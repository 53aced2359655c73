# SPDX-License-Identifier: Apache-2.0
"""A client that times captured rows over HTTP, and the delay of other requests."""

import asyncio
import base64
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pybase64

sys.path.append(str(Path(__file__).resolve().parents[2] / "client"))

from clearbox_client import Client
from clearbox_client.connection import Connections
from clearbox_client.requests import encoded

PROMPT_TOKENS = 512
MANY, MANY_TOKENS = 32, 256
STEADY_TOKENS = 512
"""Tokens of the request that streams during the other ones."""


async def measure(
    url: str, rounds: int, names: Sequence[str] = ()
) -> AsyncIterator[tuple[str, list[float]]]:
    """Yield names and lists of seconds; the caller computes medians.

    Args:
        url: of the server.
        rounds: how often each form is measured.
        names: of the forms to measure; all if empty.

    """

    def chosen(*forms: Form) -> list[Form]:
        return [form for form in forms if not names or form.name in names]

    with (
        Client(url, model="m") as client,
        ThreadPoolExecutor(MANY) as threads,
    ):
        ways = Ways(client, Connections(url, {}, 600, 8 << 30))
        for form in chosen(*FORMS, *JSON_FORMS):
            ask = partial(fetch, ways, PROMPT_TOKENS, 1, form)
            ask()
            yield f"one, {form.name}", [ask() for _ in range(rounds)]
        for form in (NOT_CAPTURED, *chosen(*FORMS)):
            walls, gaps, healths = [], [], []
            for number in range(-1, rounds):
                others = asyncio.ensure_future(others_feel(url))
                await asyncio.sleep(0.5)
                begin = time.perf_counter()
                ask = partial(fetch, ways, MANY_TOKENS, 2, form)
                loop = asyncio.get_running_loop()
                asked = [loop.run_in_executor(threads, ask) for _ in range(MANY)]
                await asyncio.gather(*asked)
                wall = time.perf_counter() - begin
                gap, health = await others
                if number >= 0:  # The first warms up.
                    walls.append(wall)
                    gaps.append(gap)
                    healths.append(health)
            yield f"{MANY} at once, {form.name}", walls
            yield f"{MANY} at once, {form.name}: longest token gap", gaps
            yield f"{MANY} at once, {form.name}: longest /health", healths
        gap, health = await others_feel(url)
        yield "nothing else: longest token gap", [gap]
        yield "nothing else: longest /health", [health]


class Ways(NamedTuple):
    """How responses are fetched."""

    client: Client
    plain: Connections
    """The client's connections, for forms that other clients read."""


SPEC = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}


def prompt_of(length: int, seed: int) -> list[int]:
    """A random prompt."""
    draw = np.random.default_rng(seed)
    tokens: list[int] = draw.integers(10, 30000, length).tolist()
    return tokens


def fields(transport: str | None) -> dict[str, Any]:
    """The fields of a request, captured at all layers if there is a transport."""
    asked = {"max_tokens": 1, "temperature": 0, "detokenize": False}
    if transport is None:
        return asked
    return {**asked, "capture": {"inline": {**SPEC, "transport": transport}}}


def fetch(ways: Ways, length: int, seed: int, form: "Form") -> float:
    """Seconds until the rows are available as numpy arrays."""
    prompt = prompt_of(length, seed)
    begin = time.perf_counter()
    arrays = form.fetch(ways, prompt)
    seconds = time.perf_counter() - begin
    if form is not NOT_CAPTURED and not (arrays and all(map(len, arrays))):
        raise RuntimeError("no rows came")
    return seconds


def not_captured(ways: Ways, prompt: list[int]) -> list[np.ndarray]:
    """No rows."""
    ways.client.complete(prompt, **fields(None))
    return []


def from_safetensors(ways: Ways, prompt: list[int]) -> list[np.ndarray]:
    """The rows in the model's dtype, as the client returns them."""
    rows = ways.client.complete(prompt, **fields("http")).rows
    return [one.stored for one in rows.values()]


def as_float32(ways: Ways, prompt: list[int]) -> list[np.ndarray]:
    """The rows as numbers."""
    rows = ways.client.complete(prompt, **fields("http")).rows
    return [one.values for one in rows.values()]


def from_shared_memory(ways: Ways, prompt: list[int]) -> list[np.ndarray]:
    """The rows in memory that the client maps."""
    rows = ways.client.complete(prompt, **fields("shm")).rows
    return [one.stored for one in rows.values()]


def from_json(ways: Ways, prompt: list[int]) -> list[np.ndarray]:
    """The rows of a JSON response, with fast decoders."""
    payload = msgspec.json.decode(_json(ways, prompt))
    return [
        np.frombuffer(
            pybase64.b64decode(entry["data"], validate=True), np.uint16
        ).reshape(entry["shape"])
        for entry in payload["capture_results"]["inline"]["payload"]
    ]


def from_json_slowly(ways: Ways, prompt: list[int]) -> list[np.ndarray]:
    """As `from_json`, with the standard library."""
    payload = json.loads(_json(ways, prompt))
    return [
        np.frombuffer(base64.b64decode(one["data"]), np.uint16).reshape(one["shape"])
        for one in payload["capture_results"]["inline"]["payload"]
    ]


def _json(ways: Ways, prompt: list[int]) -> bytes:
    asked = {"model": "m", "prompt": prompt, "capture_wait": True, **fields("http")}
    accept = {"Accept": "application/json"}
    with ways.plain.ask("POST", "/v1/completions", encoded(asked), accept) as answer:
        return bytes(answer.read())


class Form(NamedTuple):
    """A form of responses."""

    name: str
    fetch: Callable[[Ways, list[int]], list[np.ndarray]]


FORMS = (
    Form("safetensors", from_safetensors),
    Form("safetensors, as float32", as_float32),
    Form("shared memory", from_shared_memory),
)
JSON_FORMS = (
    Form("JSON", from_json),
    Form("JSON, standard library", from_json_slowly),
)
"""One at a time: 32 take this one client process 20 s."""
NOT_CAPTURED = Form("not captured", not_captured)


async def others_feel(url: str) -> tuple[float, float]:
    """The longest time between two tokens of a stream, and the slowest `/health`.

    The stream is read by a separate process, which is not delayed by this one's parsing
    of large responses.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, url),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    gap, health = json.loads(out)
    return gap, health


async def _watch(url: str) -> None:
    asked = fields(None) | {
        "model": "m",
        "prompt": prompt_of(16, 3),
        "max_tokens": STEADY_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    gaps, healths = [0.0], [0.0]
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def ask_health() -> None:
            while True:
                begin = time.perf_counter()
                await client.get("/health")
                healths.append(time.perf_counter() - begin)
                await asyncio.sleep(0.01)

        asking = asyncio.ensure_future(ask_health())
        last = None
        async with client.stream("POST", "/v1/completions", json=asked) as reply:
            async for line in reply.aiter_lines():
                now = time.perf_counter()
                if line.startswith("data: {"):
                    if last is not None:
                        gaps.append(now - last)
                    last = now
        asking.cancel()
    print(json.dumps([max(gaps), max(healths)]))


if __name__ == "__main__":
    asyncio.run(_watch(sys.argv[1]))
