# SPDX-License-Identifier: Apache-2.0
"""What a request says to the filesystem consumer."""

from dataclasses import dataclass
from typing import Any, Literal

Layout = Literal["per_file", "packed", "sharded"]
LAYOUTS: tuple[Layout, ...] = ("per_file", "packed", "sharded")


@dataclass
class FilesystemCaptureRequest:
    """What `SamplingParams.capture["filesystem"]` holds; a dict will do as well."""

    request_id: str | None = None
    """The folder of the request; the request's own id if None."""
    tag: str = "default"
    """The folder above it."""
    hooks: Any = None
    """Hook point -> layer selector: a list, `"all"`, or
    `{"layers": [...], "ranges": [[first, last], ...]}`."""
    positions: Any = "last_prompt"
    """A position selector."""
    layout: str | None = None
    """How the rows lie in files; the consumer's own layout if None."""
    codec: str | None = None
    """How the rows are encoded; the consumer's own codec if None."""
