# SPDX-License-Identifier: Apache-2.0
"""A client of a server with keys, and a watch on response times."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

from tests.support.server import Reply, Server


class Client:
    """A client with or without a key."""

    def __init__(self, server: Server, key: str = "") -> None:
        self.server = server
        self._key = key

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        key: bytes | None = None,
    ) -> Reply:
        """Send a request with this raw body; returns the reply."""
        given = self._key.encode() if key is None else key
        headers = {"Content-Type": "application/json"}
        if given:
            # The client encodes headers as Latin-1, so these bytes are sent.
            headers["Authorization"] = (b"Bearer " + given).decode("latin-1")
        request = urllib.request.Request(
            self.server.url + path, body, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                status, text = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return Reply(status, json.loads(text))
        except ValueError:
            return Reply(status, text.decode(errors="replace"))

    def get(self, path: str) -> Reply:
        """The reply to GET."""
        return self.send("GET", path)

    def post(self, path: str, body: Any, key: bytes | None = None) -> Reply:
        """The reply to POST with a JSON body."""
        return self.send("POST", path, json.dumps(body).encode(), key)


@contextmanager
def watching(server: Server, pause: float = 0.002) -> Iterator[list[float]]:
    """Measure `/health` meanwhile; yields the seconds of each request."""
    waits: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            begun = perf_counter()
            assert server.get("/health").status == 200
            waits.append(perf_counter() - begun)
            sleep(pause)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield waits
    finally:
        done.set()
        thread.join(timeout=60)
