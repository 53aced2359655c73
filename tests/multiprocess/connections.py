# SPDX-License-Identifier: Apache-2.0
"""Clients of a server whose API server processes share one port.

The kernel chooses the process for each connection, so a client keeps its connection and
reports the process.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

ENVIRONMENT = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
"""The server must not close idle connections."""

_TRIES = 64


@dataclass
class Connections:
    """Opens clients, each of which stays with one API server process."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)
    _opened: ExitStack = field(default_factory=ExitStack)

    def to(self, number: int, processes: list[int]) -> httpx.Client:
        """A new client of the process `processes[number]`."""
        for _ in range(_TRIES):
            client, process = self._open()
            if process == processes[number]:
                return client
            client.close()
        raise AssertionError(f"no connection came to process {processes[number]}")

    def processes(self, count: int) -> list[int]:
        """The ids of the API server processes."""
        found: set[int] = set()
        for _ in range(_TRIES):
            client, process = self._open()
            client.close()
            found.add(process)
            if len(found) == count:
                return sorted(found)
        raise AssertionError(f"only the processes {found} answer, not {count}")

    def _open(self) -> tuple[httpx.Client, int]:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        client = httpx.Client(
            base_url=self.url, timeout=120, limits=limits, **self.options
        )
        self._opened.enter_context(client)
        answer = client.get("/health")
        address = answer.extensions["network_stream"].get_extra_info("client_addr")
        return client, _other_end(address[1])

    def close(self) -> None:
        """Close every client."""
        self._opened.close()


@contextmanager
def connections(url: str, **options: Any) -> Iterator[Connections]:
    """Clients that are closed at the end."""
    opened = Connections(url, options)
    try:
        yield opened
    finally:
        opened.close()


def _other_end(port: int) -> int:
    """The API server process to which the connection from `port` is open."""
    for process in psutil.Process().children(recursive=True):
        for one in process.net_connections("tcp"):
            if one.raddr and one.raddr.port == port:
                return int(process.pid)
    raise AssertionError(f"nobody holds the connection from port {port}")
