# SPDX-License-Identifier: Apache-2.0
"""Bounds the memory of responses with tensors, until they are sent."""

from http import HTTPStatus

from fastapi import HTTPException

from vllm.v1.capture.frontend.unsent import when_response_ends

MOST_BYTES = 64 << 20
"""Bytes of the tensors of one response, in float32."""
MOST_TOGETHER = 8 * MOST_BYTES
"""The same of all responses that are computed or were not read yet."""

MOST_NUMBERS = 1 << 18
"""Numbers of a response that are sent as text."""

MOST_DIRECTIONS = 1 << 22
"""Numbers of the directions of one request: 16 MiB, which the engine gets whole."""


def check_directions(count: int) -> None:
    """Refuse directions that would take the event loop long to send.

    Raises:
        ValueError: they have more than `MOST_DIRECTIONS` numbers.

    """
    if count > MOST_DIRECTIONS:
        raise ValueError(
            f"directions: their vectors have {count} numbers; at most "
            f"{MOST_DIRECTIONS} are taken: send several requests"
        )


def check_numbers(count: int, what: str) -> None:
    """Refuse a response that would take the event loop seconds to write.

    Raises:
        ValueError: it has more than `MOST_NUMBERS` numbers.

    """
    if count > MOST_NUMBERS:
        raise ValueError(
            f"{what}: {count} numbers in the response; at most {MOST_NUMBERS} are sent "
            "as text: ask for fewer tokens, layers or rows at a time"
        )


class Room:
    """Counts the bytes of responses on the event loop's thread."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, rows: int, width: int, what: str) -> None:
        """Count a response of `[rows, width]` numbers until it is sent.

        Raises:
            ValueError: it is too large; the message says how many rows are possible.
            HTTPException: others have the room (503).

        """
        size = rows * width * 4
        if size > MOST_BYTES:
            raise ValueError(
                f"{what}: {rows} rows of {width} numbers are more than the "
                f"{MOST_BYTES >> 20} MiB of a response; send at most "
                f"{max(MOST_BYTES // (width * 4), 1)} rows at a time"
            )
        if self._taken + size > MOST_TOGETHER:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the responses to other requests have the memory; try again",
                {"Retry-After": "1"},
            )
        if when_response_ends(lambda: self._free(size)):
            self._taken += size

    def _free(self, size: int) -> None:
        self._taken -= size
