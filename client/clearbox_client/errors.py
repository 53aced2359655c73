# SPDX-License-Identifier: Apache-2.0
"""Errors of servers and of the client itself."""

import re
from typing import Any

_EXTRAS = re.compile(
    r"^(?P<text>.*) \((?:parameter=(?P<parameter>[^,()]*(?:\[[^\]]*\])?))"
    r"(?:, value=(?P<value>.*))?\)$",
    re.DOTALL,
)


_DEMAND = re.compile(r"\b(?:must|may|cannot|is needed|are needed)\b.*", re.DOTALL)


class ClearboxError(Exception):
    """The server refused a request, or failed."""

    def __init__(
        self, message: str, status: int, parameter: str | None, value: str | None
    ) -> None:
        """Create the error from a server's response.

        Args:
            message: the server's message.
            status: the HTTP status; 0 if the connection failed.
            parameter: the request field that is wrong, if the server named it.
            value: the field's value, as text.

        """
        super().__init__(message)
        self.message = message
        self.status = status
        self.parameter = parameter
        self.value = value

    @property
    def remedy(self) -> str | None:
        """The remedy, if the message contains one.

        It is the text after a semicolon or a full stop, or a clause with "must".
        """
        parts = re.split(r"[;.] ", self.message, maxsplit=1)
        if len(parts) == 2:
            return parts[1]
        found = _DEMAND.search(self.message)
        return found[0] if found else None

    @classmethod
    def of(cls, status: int, body: Any) -> "ClearboxError":
        """Create the error from a response's body, which may be anything."""
        error = body.get("error", body) if isinstance(body, dict) else {}
        if not isinstance(error, dict):
            error = {"message": str(error)}
        text = str(error.get("message") or body)
        found = _EXTRAS.match(text)
        if status < 400 and isinstance(error.get("code"), int):
            status = error["code"]  # An event of a stream, which began with 200.
        parameter, value = error.get("param"), None
        if found is not None:
            text = found["text"]
            parameter = parameter or found["parameter"]
            value = found["value"]
        return cls(text, status, parameter, value)


class InputError(ClearboxError, ValueError):
    """The client refused a value; no request was sent."""

    def __init__(self, message: str, parameter: str, value: object) -> None:
        """Create the error; `message` has the remedy after a semicolon."""
        super().__init__(message, 0, parameter, str(value)[:120])
