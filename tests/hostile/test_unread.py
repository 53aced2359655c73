# SPDX-License-Identifier: Apache-2.0
"""Responses that clients do not read are limited, like rows in flight."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.hostile.client import Client, watching
from tests.hostile.conftest import INLINE_BYTES, WIDTH
from tests.hostile.memory import run_in
from tests.support.server import Server
from tests.support.waiting import until
from vllm.entrypoints.serve.interp_engine.room import MOST_BYTES, MOST_TOGETHER

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOOKS = ("pre_attn", "post_attn", "post_block")
PROMPT, LAYERS, SAMPLES = [*range(20, 270)], 3, 8
ROWS_BYTES = len(PROMPT) * len(HOOKS) * LAYERS * SAMPLES * WIDTH * 4
CLIENTS = 16

BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": PROMPT,
    "max_tokens": 1,
    "n": SAMPLES,
    "capture": {
        "inline": {"hooks": dict.fromkeys(HOOKS, "all"), "positions": "all_prompt"}
    },
}


class Deaf:
    """A client that reads the beginning of a response and then stops."""

    def __init__(
        self,
        server: Server,
        key: str,
        body: dict[str, Any],
        path: str = "/v1/completions",
    ) -> None:
        text = json.dumps(body).encode()
        where = urlsplit(server.url)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(120)
        self.socket.connect((where.hostname, where.port))
        self.socket.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\n"
            % (path.encode(), key.encode())
            + b"Content-Length: %d\r\n\r\n" % len(text)
            + text
        )

    def is_admitted(self) -> bool:
        """Whether the response is anything but an error."""
        deadline = monotonic() + 120
        while monotonic() < deadline:
            seen = self.socket.recv(2000, socket.MSG_PEEK)
            body = seen.partition(b"\r\n\r\n")[2]
            if len(body) > 100:
                return b'"error"' not in body
            sleep(0.05)
        raise TimeoutError("no response")


def resident(pid: int) -> int:
    """Bytes of a process's private memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if "RssAnon" in line)


def peak(pid: int) -> int:
    """The largest size in bytes of a process's resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if "VmHWM" in line)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("streamed", [False, True])
def test_what_clients_do_not_read_is_bounded(
    attacked: Server,
    client: Client,
    api_key: str,
    opened: ExitStack,
    streamed: bool,
) -> None:
    assert client.post("/v1/completions", BODY).status == 200
    body = {**BODY, "stream": streamed}
    before = resident(attacked.pid)
    deaf = [Deaf(attacked, api_key, body) for _ in range(CLIENTS)]
    for one in deaf:
        opened.enter_context(one.socket)
    admitted = sum(one.is_admitted() for one in deaf)
    assert 1 <= admitted <= INLINE_BYTES // ROWS_BYTES
    sleep(1)  # For data that would be buffered beyond the limit.
    assert resident(attacked.pid) - before < 2 * INLINE_BYTES
    refused = client.post("/v1/completions", BODY)
    assert refused.status == 400 and "unread responses" in str(refused.body)
    assert client.post("/v1/completions", {**BODY, "capture": {}}).status == 200
    opened.close()
    until(lambda: client.post("/v1/completions", BODY).status == 200, 30)


@pytest.mark.hostile
def test_tensors_that_clients_of_interp_engine_do_not_read_are_bounded(
    attacked: Server, client: Client, api_key: str, opened: ExitStack
) -> None:
    path = "/v1/interp-engine/unembed_rows"
    body = {"token_ids": [5] * (MOST_BYTES // (WIDTH * 4))}
    admitted = MOST_TOGETHER // MOST_BYTES
    before = resident(attacked.pid)
    deaf = [Deaf(attacked, api_key, body, path) for _ in range(2 * admitted)]
    for one in deaf:
        opened.enter_context(one.socket)
    assert sum(one.is_admitted() for one in deaf) == admitted
    # Their bodies and a message or two of the engine's are held besides.
    assert resident(attacked.pid) - before < 1.75 * MOST_TOGETHER
    refused = client.post(path, {"token_ids": [5]})
    assert refused.status == 503 and "try again" in str(refused.body)
    assert client.post("/v1/completions", {**BODY, "capture": {}}).status == 200
    opened.close()
    until(lambda: client.post(path, {"token_ids": [5]}).status == 200, 30)


READOUTS: dict[str, Any] = {
    **BODY,
    "n": 1,
    "capture": None,
    "readouts": {
        f"lens-{number}": {
            "kind": "lens",
            "layers": "all",
            "top_k": 64,
            "positions": "all_prompt",
        }
        for number in range(40)
    },
}
"""Just below the numbers that the results of a request may have."""


@pytest.mark.hostile
@pytest.mark.parametrize("choices", [1, 6])
def test_large_results_of_readouts_delay_nobody(
    choices: int, attacked: Server, client: Client
) -> None:
    small = {**READOUTS, "prompt": PROMPT[:2]}
    assert client.post("/v1/completions", small).status == 200
    Path(f"/proc/{attacked.pid}/clear_refs").write_text("5")  # The peak starts anew.
    before = peak(attacked.pid)
    # Of several choices each array is small.
    prompts = [PROMPT[: len(PROMPT) // choices] for _ in range(choices)]
    with watching(attacked) as watch:
        reply = client.post("/v1/completions", {**READOUTS, "prompt": prompts})
        found = reply.body["choices"] and reply.body["readouts"]
        lens = (found if choices == 1 else found[str(choices - 1)])["lens-39"]
        assert len(lens["positions"]) == len(prompts[0])
        assert len(lens["logprobs"]) == len(prompts[0])
        assert len(lens["logprobs"][0]) == 3
    more = peak(attacked.pid) - before
    print(f"/health: {max(watch.waits):.3f} s, of it running {max(watch.owned):.3f} s")
    print(f"more memory at the peak: {more >> 20} MiB")
    assert max(watch.owned) < 0.25
    assert more < 64 << 20


LIMITS = "vllm.v1.capture.frontend.inflight_limit"
SENDING = "vllm.entrypoints.serve.capture.sending"


def set_limit(server: Server, size: str) -> None:
    """Let results of readouts take together at most so much."""
    source = f"""
import gc
import sys

module = sys.modules.get({LIMITS!r})
gc.unfreeze()  # A server hides what it has made at the start.
for one in gc.get_objects():
    if module is not None and type(one) is module.InflightLimit and one.limits:
        one.limits[module.RESULTS] = {size.replace("DEFAULT", "module.RESULT_BYTES")}
"""
    run_in(server, source)


def set_stall(server: Server, seconds: float) -> None:
    """Let responses be cut after so many seconds in which nothing is read."""
    source = f"""
import sys

module = sys.modules.get({SENDING!r})
if module is not None:
    module.STALL_SECONDS = {seconds}
"""
    run_in(server, source)


@pytest.mark.hostile
def test_results_of_readouts_that_nobody_reads_are_bounded_and_cut(
    attacked: Server, client: Client, api_key: str, opened: ExitStack
) -> None:
    most = 200 << 20
    set_limit(attacked, str(most))
    opened.callback(set_limit, attacked, "DEFAULT")
    opened.callback(set_stall, attacked, 120.0)
    before = resident(attacked.pid)
    deaf = [Deaf(attacked, api_key, READOUTS) for _ in range(6)]
    for one in deaf:
        opened.enter_context(one.socket)
    assert sum(one.is_admitted() for one in deaf) == 2
    assert resident(attacked.pid) - before < most
    refused = client.post("/v1/completions", READOUTS)
    assert refused.status == 400 and "unread responses" in str(refused.body)
    assert refused.body["error"]["param"] == "readouts"
    small = {**READOUTS, "prompt": PROMPT[:2]}
    assert client.post("/v1/completions", small).status == 200
    for one in deaf:  # Two responses that nobody reads, cut after two seconds.
        one.socket.close()
    set_stall(attacked, 2.0)
    deaf = [Deaf(attacked, api_key, READOUTS) for _ in range(2)]
    for one in deaf:
        opened.enter_context(one.socket)
    assert all(one.is_admitted() for one in deaf)
    until(lambda: client.post("/v1/completions", READOUTS).status == 200)
    assert "has not read its response for 2 s" in attacked.log.read_text()


@pytest.mark.hostile
def test_a_client_reads_the_error_of_a_step(attacked: Server, client: Client) -> None:
    source = """
import sys

module = sys.modules.get("vllm.v1.steering.worker.worker")
if module is not None:
    usual = module.WorkerSteering.plan_step

    def failing(*given, **named):
        module.WorkerSteering.plan_step = usual
        raise ValueError("injected \\ud800")

    module.WorkerSteering.plan_step = failing
"""
    steered = {
        "model": "tiny",
        "prompt": PROMPT[:4],
        "max_tokens": 3,
        "steering_vectors": {"post_block": {"1": [0.5] * WIDTH}},
    }
    for streamed in (False, True):
        run_in(attacked, source)
        reply = client.post("/v1/completions", {**steered, "stream": streamed})
        assert reply.status == (200 if streamed else 500), reply
        assert "failed: ValueError: injected \\\\ud800" in str(reply.body), reply
        usual = client.post("/v1/completions", steered)
        assert usual.status == 200, usual
