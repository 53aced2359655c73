# SPDX-License-Identifier: Apache-2.0
"""Frames of the page, before a server that streams at a given rate."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tests.support.browser import opened
from vllm.entrypoints.serve.lens_page.route import HEADERS, STATIC

pytestmark = [pytest.mark.page, pytest.mark.slow]

RATE, TOKENS, LONG = 100, 500, 8000
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "stub", "max_model_len": 10_000}]},
    "/v1/readouts": {"enabled": True, "modules": {}},
    "/v1/capture": {"hook_points": {"0": ["post_block"]}, "consumers": []},
}


class Stub(BaseHTTPRequestHandler):
    """The page's files, and the routes that a stream needs."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self, data: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/lens/"):
            file = STATIC / (path.removeprefix("/lens/") or "index.html")
            self.answer(file.read_bytes(), TYPES.get(file.suffix, "text/plain"))
        else:
            self.answer(json.dumps(ANSWERS.get(path, {})).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            words = body["prompt"].split(" ")
            pieces = ["Ġ" + word for word in words]
            found = {"tokens": list(range(len(words))), "token_strs": pieces}
            self.answer(json.dumps(found).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        begun = time.monotonic()
        for number in range(TOKENS):
            time.sleep(max(0.0, begun + number / RATE - time.monotonic()))
            last = number == TOKENS - 1
            self.wfile.write(f"data: {json.dumps(chunk(number, last))}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


def chunk(number: int, last: bool) -> dict[str, Any]:
    logprobs = {
        "tokens": [" word"],
        "token_logprobs": [-number % 7],
        "top_logprobs": [{" word": -1.0, " other": -2.0}],
    }
    tint = {
        "kind": "norm",
        "positions": [number],
        "taps": [[0, "post_block"]],
        "norm": [[float(number % 11)]],
        "cosine": [[None]],
    }
    reason = "length" if last else None
    choice = {"logprobs": logprobs, "token_ids": [7], "finish_reason": reason}
    return {"choices": [choice], "readouts": {"tint": tint}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    Thread(target=stub.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{stub.server_port}"
    stub.shutdown()


COUNT = """seconds => new Promise(done => {
  const found = []; let last = performance.now(); const end = last + seconds * 1000;
  const next = now => {
    found.push(now - last); last = now;
    if (now < end) requestAnimationFrame(next); else done(found.slice(1));
  };
  requestAnimationFrame(next);
})"""
SCROLL = """seconds => {
  const text = document.querySelector('.tokens');
  const begun = performance.now();
  const step = () => {
    const share = (performance.now() - begun) / (seconds * 1000);
    text.scrollTop = share * text.scrollHeight;
    if (share < 1) requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}"""


def late(frames: list[float]) -> float:
    """The share of a display's 60 frames per second that were dropped."""
    dropped = sum(max(0, round(frame * 60 / 1000) - 1) for frame in frames)
    return dropped / max(1.0, sum(frames) * 60 / 1000)


def test_a_stream_with_tints_drops_no_frames(url: str) -> None:
    with opened() as tab:
        tab.goto(url + "/lens/#tint=norm&prompt=a")
        tab.wait_for_selector("textarea")
        tab.wait_for_timeout(500)
        idle = tab.evaluate(COUNT, 3)
        tab.click("button:has-text('Generate')")
        busy = tab.evaluate(COUNT, 4)
        tab.wait_for_selector(f".token >> nth={TOKENS}", state="attached")
        tinted = tab.locator(".token[style]").count()
        assert tab.errors == []
    print(f"dropped at {RATE} tokens/s: {late(busy):.2%}; idle: {late(idle):.2%}")
    assert tinted >= TOKENS - 1
    assert late(busy) <= late(idle) + 0.02


def test_a_long_text_scrolls(url: str) -> None:
    with opened() as tab:
        tab.goto(url + "/lens/")
        tab.fill("textarea", " ".join(f"word{n}" for n in range(LONG)))
        tab.wait_for_selector(f".token >> nth={LONG - 1}", state="attached")
        tab.wait_for_timeout(500)
        idle = tab.evaluate(COUNT, 2)
        tab.evaluate(SCROLL, 3)
        frames = tab.evaluate(COUNT, 3)
        assert tab.locator(".token").count() == LONG
    print(f"dropped while {LONG} tokens scroll: {late(frames):.2%}; {late(idle):.2%}")
    assert late(frames) <= late(idle) + 0.05


def listed(logprobs: np.ndarray, count: int = 20) -> list[tuple[int, float]]:
    """The likeliest tokens, as the server lists them."""
    return [(int(k), float(logprobs[k])) for k in np.argsort(-logprobs)[:count]]


def test_the_divergence_is_a_useful_lower_bound(url: str) -> None:
    random = np.random.default_rng()
    steered, plain = random.normal(0, 5, (2, 300, 500))
    plain[:100] = steered[:100] + random.normal(0, 0.3, (100, 500))
    steered, plain = (
        x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (steered, plain)
    )
    true = (np.exp(steered) * (steered - plain)).sum(-1)
    lists = [[listed(p), listed(q)] for p, q in zip(steered, plain)]
    with opened() as tab:
        tab.goto(url + "/lens/")
        bounds = tab.evaluate(
            "async lists => { const found = await import('/lens/views/pair.js');"
            "return lists.map(one => found.klAtLeast(...one)); }",
            lists,
        )
    share = np.array(bounds) / true
    assert share.max() <= 1 + 1e-6
    # Most of their likely tokens differ in the last 200 pairs.
    print(
        f"of the divergence: {np.median(share[:100]):.2f}, {np.median(share[100:]):.2f}"
    )
    assert np.median(share[:100]) > 0.9 and np.median(share[100:]) > 0.2
