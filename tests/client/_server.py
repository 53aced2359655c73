# SPDX-License-Identifier: Apache-2.0
"""A server for the client's connections."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

LARGE = bytes(range(256)) * 20_000


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    protocol_version = "HTTP/1.1"
    connections: set[Any]
    more: threading.Event

    def do_POST(self) -> None:
        self.connections.add(self.client_address)
        given = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/stream":
            self._stream()
        elif self.path == "/short":
            self._head(len(LARGE))
            self.wfile.write(LARGE[:1000])
            self.close_connection = True
        elif self.path == "/closes":
            self._head(2)
            self.wfile.write(b"ok")
            self.close_connection = True  # Without saying so in the head.
        elif self.path == "/rows":
            self._head(len(LARGE), "application/safetensors")
            self.wfile.write(LARGE)
        elif self.path == "/cut":
            self._head(len(LARGE), "application/safetensors")
            self.wfile.write(LARGE[:1000])
            self.close_connection = True
        elif self.path == "/slow":
            self._head(len(LARGE), "application/safetensors")
            self.wfile.write(LARGE[:1000])
            self.wfile.flush()
            self.more.wait(30)
            self.wfile.write(LARGE[1000:])
        elif self.path == "/packed":
            data = gzip.compress(LARGE)
            self._head(len(data), "application/safetensors", "gzip")
            self.wfile.write(data)
        else:
            self._head(len(given) + len(LARGE))
            self.wfile.write(given + LARGE)

    def _head(self, length: int, kind: str = "", encoding: str = "") -> None:
        self.send_response(200)
        if kind:
            self.send_header("Content-Type", kind)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (b"data: 1\n\n", b"data: 2\n\ndata: [DONE]\n\n"):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
            self.more.wait(30)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
