# SPDX-License-Identifier: Apache-2.0
"""A client of a server with keys, and a watch on response times."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request

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
        url = self.server.url + path
        return self.server.send(Request(url, body, headers, method=method))

    def get(self, path: str) -> Reply:
        """The reply to GET."""
        return self.send("GET", path)

    def post(self, path: str, body: Any, key: bytes | None = None) -> Reply:
        """The reply to POST with a JSON body."""
        return self.send("POST", path, json.dumps(body).encode(), key)


@dataclass(slots=True)
class Watch:
    """What `watching` has seen, once it ends."""

    waits: list[float] = field(default_factory=list)
    """Seconds that each request to `/health` took."""
    owned: list[float] = field(default_factory=list)
    """The part of each during which the server's process was running.

    Without the time in which the machine gave its main thread or the watcher no
    processor.
    """
    blocked: list[float] = field(default_factory=list)
    """The part of each in which the server neither ran nor waited for a processor."""


@contextmanager
def watching(server: Server) -> Iterator[Watch]:
    """Measure requests to `/health` meanwhile, from another process."""
    watcher = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.watcher", server.url, str(server.pid)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "ready\n"
    watch = Watch()
    try:
        yield watch
    finally:
        told, _ = watcher.communicate(timeout=150)
        assert watcher.returncode == 0, watcher.returncode
        seen = json.loads(told)
        for seconds, owned, blocked in seen:
            watch.waits.append(seconds)
            watch.owned.append(owned)
            watch.blocked.append(blocked)
