# SPDX-License-Identifier: Apache-2.0
"""Errors of servers and of the client itself."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

MOST_CHARACTERS = 1 << 16
"""Characters of a message that are kept."""

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
        text = str(error.get("message") or body)[:MOST_CHARACTERS]
        if status < 400 and isinstance(error.get("code"), int):
            status = error["code"]  # An event of a stream, which began with 200.
        parameter, value = error.get("param"), None
        before, mark, extras = text.rpartition(" (parameter=")
        if mark and extras.endswith(")"):
            name, said, given = extras[:-1].partition(", value=")
            text, parameter = before, parameter or name
            value = given if said else None
        return cls(text, status, parameter, value)


@contextmanager
def understood(status: int) -> Iterator[None]:
    """Convert whatever fails when a server's answer is parsed.

    Raises:
        ClearboxError: the answer is malformed.

    """
    try:
        yield
    except (ClearboxError, OSError, HTTPException):
        raise
    except Exception as error:  # The server may have sent anything.
        raise ClearboxError(
            f"the server's answer is malformed ({repr(error)[:200]}); is it a server "
            "of this version?",
            status,
            None,
            None,
        ) from error


class InputError(ClearboxError, ValueError):
    """The client refused a value; no request was sent."""

    def __init__(self, message: str, parameter: str, value: object) -> None:
        """Create the error; `message` has the remedy after a semicolon."""
        super().__init__(message, 0, parameter, str(value)[:120])
