# SPDX-License-Identifier: Apache-2.0
"""A client that times captured rows over HTTP, and the delay of other requests."""

import asyncio
import base64
import json
import mmap
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pybase64

sys.path.append(str(Path(__file__).resolve().parents[2] / "client"))

from clearbox_client.direct import DirectTransport

PROMPT_TOKENS = 512
MANY, MANY_TOKENS = 32, 256
STEADY_TOKENS = 512
"""Tokens of the request that streams during the other ones."""


async def measure(url: str, rounds: int) -> AsyncIterator[tuple[str, list[float]]]:
    """Yield names and lists of seconds; the caller computes medians."""
    # The transport of clearbox-client: `httpx` by itself takes ten times as long.
    transport = DirectTransport()
    with (
        httpx.Client(base_url=url, timeout=600, transport=transport) as client,
        ThreadPoolExecutor(MANY) as threads,
    ):
        for form in (*FORMS, SLOW):
            ask = partial(fetch, client, PROMPT_TOKENS, 1, form)
            ask()
            yield f"one, {form.name}", [ask() for _ in range(rounds)]
        for form in (NOT_CAPTURED, *MANY_FORMS):
            walls, gaps, healths = [], [], []
            for number in range(-1, rounds):
                others = asyncio.ensure_future(others_feel(url))
                await asyncio.sleep(0.5)
                begin = time.perf_counter()
                ask = partial(fetch, client, MANY_TOKENS, 2, form)
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


def body(length: int, seed: int, transport: str | None) -> dict[str, Any]:
    """The body of a request, captured at all layers if there is a transport."""
    draw = np.random.default_rng(seed)
    spec = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}
    asked = {
        "model": "m",
        "prompt": draw.integers(10, 30000, length).tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "detokenize": False,
        "return_token_ids": True,
    }
    if transport is not None:
        asked["capture"] = {"inline": {**spec, "transport": transport}}
    return asked


def fetch(client: httpx.Client, length: int, seed: int, form: "Form") -> float:
    """Seconds until the rows are available as numpy arrays."""
    asked = body(length, seed, form.transport)
    begin = time.perf_counter()
    reply = client.post("/v1/completions", json=asked, headers={"Accept": form.accept})
    reply.raise_for_status()
    if form.read is None:
        return time.perf_counter() - begin
    arrays = form.read(reply.content)
    seconds = time.perf_counter() - begin
    if form.transport == "shm":
        payload = json.loads(reply.content)["capture_results"]["inline"]["payload"]
        client.delete(f"/v1/capture/shm/{payload[0]['shm']['token']}")
    if not arrays or any(len(one) == 0 for one in arrays):
        raise RuntimeError("no rows came")
    return seconds


def from_json(data: bytes) -> list[np.ndarray]:
    """Read arrays from a JSON response, with fast decoders."""
    payload = msgspec.json.decode(data)["capture_results"]["inline"]["payload"]
    return [
        np.frombuffer(
            pybase64.b64decode(told["data"], validate=True), np.uint16
        ).reshape(told["shape"][0], -1)
        for told in payload
    ]


def from_json_slowly(data: bytes) -> list[np.ndarray]:
    """As `from_json`, with the standard library."""
    payload = json.loads(data)["capture_results"]["inline"]["payload"]
    return [
        np.frombuffer(base64.b64decode(told["data"]), np.uint16).reshape(
            told["shape"][0], -1
        )
        for told in payload
    ]


def from_safetensors(data: bytes) -> list[np.ndarray]:
    """As `from_json`, without the library, which has no bfloat16 for numpy."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    arrays = []
    for entry in header.values():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(data, np.uint16, (end - begin) // 2, begin)
        arrays.append(flat.reshape(entry["shape"][0], -1))
    return arrays


def from_shared_memory(data: bytes) -> list[np.ndarray]:
    """As `from_json`, from a mapped file in shared memory."""
    payload = json.loads(data)["capture_results"]["inline"]["payload"]
    with open(payload[0]["shm"]["path"], "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return [
        np.frombuffer(
            mapped, np.uint16, told["shm"]["nbytes"] // 2, told["shm"]["offset"]
        ).reshape(told["shape"][0], -1)
        for told in payload
    ]


def from_arrow(data: bytes) -> list[np.ndarray]:
    """The same."""
    import pyarrow as pa

    with pa.ipc.open_stream(data) as stream:
        return [
            batch["values"]
            .flatten()
            .to_numpy(zero_copy_only=False)
            .reshape(batch.num_rows, -1)
            for batch in stream
        ]


class Form(NamedTuple):
    """A form of responses."""

    name: str
    accept: str
    transport: str | None
    """None if the request captures nothing."""
    read: Callable[[bytes], list[np.ndarray]] | None


FORMS = (
    Form("safetensors", "application/safetensors", "http", from_safetensors),
    Form("arrow", "application/vnd.apache.arrow.stream", "http", from_arrow),
    Form("shared memory", "application/json", "shm", from_shared_memory),
    Form("JSON", "application/json", "http", from_json),
)
SLOW = Form("JSON, standard library", "application/json", "http", from_json_slowly)
MANY_FORMS = [form for form in FORMS if form.name != "JSON"]
"""Without JSON, which takes this one client process 20 s."""
NOT_CAPTURED = Form("not captured", "application/json", None, None)


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
    asked = body(16, 3, None) | {
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
