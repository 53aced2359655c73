# SPDX-License-Identifier: Apache-2.0
"""Streams as `multipart/mixed`: every event is a part, and so are the rows it carries.

A stream is made of server-sent events, whose rows would be base64 text. A client that
accepts multipart gets the JSON of each event as a part of its own, directly followed by
one binary part per tensor.
"""

from secrets import token_hex

from starlette.types import Message, Send

from vllm.v1.capture.frontend.unsent import ResponseScope
from vllm.v1.capture.transport.bodies import MULTIPART, form_for, last_part, text_part

EVENTS = b"text/event-stream"
_DATA, _DONE = b"data: ", b"[DONE]"


class EventParts:
    """Sends the messages of one response, with a stream's events as parts."""

    def __init__(self, response: ResponseScope, send: Send) -> None:
        """Send with `send`; responses other than streams are sent as they are."""
        self._response = response
        self._send = send
        self._has_ended = False

    async def __call__(self, message: Message) -> None:
        """Send a message."""
        if message["type"] == "http.response.start":
            message = self._started(message)
        elif message["type"] == "http.response.body" and self._response.boundary:
            message = {**message, "body": self._body(message)}
            if not message["body"] and message.get("more_body", False):
                return
        await self._send(message)

    def _started(self, start: Message) -> Message:
        headers = dict(start.get("headers", ()))
        if not headers.get(b"content-type", b"").startswith(EVENTS):
            return start
        self._response.boundary = token_hex(16)
        kind = f"{MULTIPART}; boundary={self._response.boundary}"
        headers[b"content-type"] = kind.encode()
        return {**start, "headers": list(headers.items())}

    def _body(self, message: Message) -> bytes:
        data = message.get("body", b"")
        if not self._response.sends_parts:
            data = b"".join(map(self._part, bytes(data).split(b"\n\n")))
        if not message.get("more_body", False):
            data = bytes(data) + self._end()  # The stream ended early.
        return data

    def _part(self, event: bytes) -> bytes:
        text = event.strip()
        if not text.startswith(_DATA):
            return b""  # An empty line, or a comment that keeps the connection alive.
        text = text.removeprefix(_DATA)
        if text == _DONE:
            return self._end()
        assert self._response.boundary is not None
        return text_part(self._response.boundary, text)

    def _end(self) -> bytes:
        if self._has_ended or self._response.boundary is None:
            return b""
        self._has_ended = True
        return last_part(self._response.boundary)


def accepts_parts(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the first supported form in an `Accept` header is multipart."""
    accept = b",".join(value for name, value in headers if name.lower() == b"accept")
    return form_for(accept.decode("latin-1")) == MULTIPART
