# SPDX-License-Identifier: Apache-2.0
"""A client that times captured rows over HTTP, and the delay of other requests."""

import asyncio
import base64
import json
import mmap
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np

PROMPT_TOKENS = 512
MANY, MANY_TOKENS = 32, 256
STEADY_TOKENS = 512
"""Tokens of the request that streams during the other ones."""


async def measure(url: str, rounds: int) -> AsyncIterator[tuple[str, list[float]]]:
    """Yield names and lists of seconds; the caller computes medians."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        for name, accept, transport, read in FORMS:
            asked = body(PROMPT_TOKENS, 1, transport)
            await fetch(client, asked, accept, read)
            yield (
                f"one, {name}",
                [await fetch(client, asked, accept, read) for _ in range(rounds)],
            )
        for name, accept, transport, read in FORMS:
            walls, gaps, healths = [], [], []
            for _ in range(rounds):
                others = asyncio.ensure_future(others_feel(client))
                await asyncio.sleep(0.5)
                begin = time.perf_counter()
                asked = body(MANY_TOKENS, 2, transport)
                await asyncio.gather(
                    *(fetch(client, asked, accept, read) for _ in range(MANY))
                )
                walls.append(time.perf_counter() - begin)
                gap, health = await others
                gaps.append(gap)
                healths.append(health)
            yield f"{MANY} at once, {name}", walls
            yield f"{MANY} at once, {name}: longest token gap", gaps
            yield f"{MANY} at once, {name}: longest /health", healths
        gap, health = await others_feel(client)
        yield "nothing else: longest token gap", [gap]
        yield "nothing else: longest /health", [health]


def body(length: int, seed: int, transport: str) -> dict[str, Any]:
    """The body of a request whose prompt is captured at all layers."""
    draw = np.random.default_rng(seed)
    spec = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}
    return {
        "model": "m",
        "prompt": draw.integers(10, 30000, length).tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "detokenize": False,
        "return_token_ids": True,
        "capture": {"inline": {**spec, "transport": transport}},
    }


async def fetch(
    client: httpx.AsyncClient,
    asked: dict[str, Any],
    accept: str,
    read: Callable[[bytes], list[np.ndarray]],
) -> float:
    """Seconds until the rows are available as numpy arrays."""
    begin = time.perf_counter()
    headers = {"Accept": accept}
    reply = await client.post("/v1/completions", json=asked, headers=headers)
    reply.raise_for_status()
    arrays = read(reply.content)
    seconds = time.perf_counter() - begin
    if not arrays or any(len(one) == 0 for one in arrays):
        raise RuntimeError("no rows came")
    return seconds


def from_json(data: bytes) -> list[np.ndarray]:
    """Read arrays from a JSON response."""
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


FORMS = (
    # Name, Accept, transport, how the client reads it.
    ("safetensors", "application/safetensors", "http", from_safetensors),
    ("arrow", "application/vnd.apache.arrow.stream", "http", from_arrow),
    ("shared memory", "application/json", "shm", from_shared_memory),
    ("JSON", "application/json", "http", from_json),
)


async def others_feel(client: httpx.AsyncClient) -> tuple[float, float]:
    """The longest time between two tokens of a stream, and the slowest `/health`.

    The stream is read by a separate process, which is not delayed by this one's parsing
    of large responses.
    """
    import sys

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(client.base_url)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    gap, health = json.loads(out)
    return gap, health


async def _watch(url: str) -> None:
    asked = body(16, 3, "http") | {
        "max_tokens": STEADY_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    del asked["capture"]
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
    import sys

    asyncio.run(_watch(sys.argv[1]))
