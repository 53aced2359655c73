# SPDX-License-Identifier: Apache-2.0
"""Files that are whole under their final name, whatever happens while they grow."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from vllm.v1.capture.types import CaptureKey


def raw_bytes(rows: torch.Tensor) -> memoryview:
    """Rows as row-major bytes in their own dtype; bfloat16 as its 16 bits."""
    contiguous = rows.contiguous()
    return memoryview(contiguous.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


class GrowingFile:
    """A file that is written aside and gets its name when it is complete.

    No descriptor is held open between writes: thousands of keys may be under way.
    """

    def __init__(self, folder: Path, key: CaptureKey, buffer_bytes: int) -> None:
        request_id, layer, hook = key
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in request_id)
        self._aside = folder / f"{safe}.{layer}_{hook}.{os.getpid()}.part"
        self._buffer_bytes = buffer_bytes
        self._buffer: list[memoryview] = []
        self._buffered = 0
        self._started = False

    def append(self, data: memoryview) -> None:
        """Add bytes; they reach the disk once the buffer is full."""
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered >= self._buffer_bytes:
            self._flush()

    def publish(self, final: Path, num_bytes: int, fsync: bool) -> None:
        """Cut the file to `num_bytes`, and give it its name.

        Raises:
            OSError: the file could not be written; nothing is left of it.

        """
        self._flush()
        final.parent.mkdir(parents=True, exist_ok=True)
        with open(self._aside, "r+b") as file:
            file.truncate(num_bytes)
            if fsync:
                os.fsync(file.fileno())
        os.replace(self._aside, final)

    def discard(self) -> None:
        """Remove what was written so far."""
        self._buffer.clear()
        self._buffered = 0
        self._aside.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._started:
            self._aside.parent.mkdir(parents=True, exist_ok=True)
        with open(self._aside, "ab" if self._started else "wb") as file:
            self._started = True
            for data in self._buffer:
                file.write(data)
        self._buffer.clear()
        self._buffered = 0


def publish_json(final: Path, content: dict[str, Any], fsync: bool) -> None:
    """Write `content` aside and give it its name."""
    aside = final.with_name(f".{final.name}.{os.getpid()}.part")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(content, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, final)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
