# SPDX-License-Identifier: Apache-2.0
"""Rows in the shared memory of a server on the same host (`"transport": "shm"`)."""

import mmap
import os
from typing import Any

from clearbox_client.bulk import entries_in
from clearbox_client.errors import ClearboxError

NAME = "/memfd:vllm-answer"
"""To what the paths of such memory link."""


MOST_TOKENS = 16
"""Of one answer: each costs a request."""


class Mapped:
    """The rows of a document that were in shared memory: now the `data` of its entries.

    The mappings are private, so that their rows may be changed. They stay valid after
    the server has freed its memory, and end with their last view.
    """

    def __init__(self) -> None:
        """Start without mappings."""
        self.tokens: list[str] = []
        """Of the memory that the server keeps until it is told to free it."""
        self._files: dict[str, memoryview] = {}

    def take(self, document: Any) -> None:
        """Map all rows of a document.

        Raises:
            ClearboxError: this process cannot open the memory.

        """
        for entry in entries_in(document.get("capture_results")):
            where = entry.get("shm")
            if where is None:
                continue
            if where["token"] not in self.tokens:
                if len(self.tokens) == MOST_TOKENS:
                    raise ValueError("one answer has one token")
                self.tokens.append(where["token"])
            begin = where["offset"]
            file = self._file(where["path"])
            entry["data"] = file[begin : begin + where["nbytes"]]
            del entry["shm"]

    def _file(self, path: str) -> memoryview:
        if path not in self._files:
            try:
                self._files[path] = _opened(path)
            except (OSError, ValueError) as error:
                raise ClearboxError(
                    f"the rows are in shared memory ({path}), which this process "
                    f"cannot open: {error}; run it on the server's host as the "
                    "server's user, or omit the transport",
                    0,
                    "transport",
                    "shm",
                ) from error
        return self._files[path]


def _opened(path: str) -> memoryview:
    if not os.readlink(path).startswith(NAME):
        raise FileNotFoundError("it is another file; the server is on another host")
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
