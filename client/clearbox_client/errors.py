# SPDX-License-Identifier: Apache-2.0
"""What a server refuses."""

import re
from typing import Any

_EXTRAS = re.compile(
    r"^(?P<text>.*) \((?:parameter=(?P<parameter>[^,()]*(?:\[[^\]]*\])?))"
    r"(?:, value=(?P<value>.*))?\)$",
    re.DOTALL,
)


_DEMAND = re.compile(r"\b(?:must|may|cannot|is needed|are needed)\b.*", re.DOTALL)


class ClearboxError(Exception):
    """The server has refused a request, or has failed."""

    def __init__(
        self, message: str, status: int, parameter: str | None, value: str | None
    ) -> None:
        """Take what the server said.

        Args:
            message: the sentence.
            status: of HTTP.
            parameter: the field of the request that is wrong, if it was named.
            value: the value that it has, as text.

        """
        super().__init__(message)
        self.message = message
        self.status = status
        self.parameter = parameter
        self.value = value

    @property
    def remedy(self) -> str | None:
        """What to do, where the message says so.

        That is what stands behind a semicolon or a full stop, or what must be.
        """
        parts = re.split(r"[;.] ", self.message, maxsplit=1)
        if len(parts) == 2:
            return parts[1]
        found = _DEMAND.search(self.message)
        return found[0] if found else None

    @classmethod
    def of(cls, status: int, body: Any) -> "ClearboxError":
        """The error of a response's body, which may be anything."""
        error = body.get("error", body) if isinstance(body, dict) else {}
        if not isinstance(error, dict):
            error = {"message": str(error)}
        text = str(error.get("message") or body)
        found = _EXTRAS.match(text)
        parameter, value = error.get("param"), None
        if found is not None:
            text = found["text"]
            parameter = parameter or found["parameter"]
            value = found["value"]
        return cls(text, status, parameter, value)


class InputError(ClearboxError, ValueError):
    """The client itself has refused something; nothing was sent."""

    def __init__(self, message: str, parameter: str, value: object) -> None:
        """Say what is wrong and, behind a semicolon, what to do."""
        super().__init__(message, 0, parameter, str(value)[:120])
