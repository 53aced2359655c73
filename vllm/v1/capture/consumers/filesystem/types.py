# SPDX-License-Identifier: Apache-2.0
"""The form of a request's spec for the consumer `filesystem`."""

from dataclasses import dataclass
from typing import Any, Literal

Layout = Literal["per_file", "packed", "sharded"]
LAYOUTS: tuple[Layout, ...] = ("per_file", "packed", "sharded")


@dataclass
class FilesystemCaptureRequest:
    """The value of `SamplingParams.capture["filesystem"]`, which may also be a dict."""

    request_id: str | None = None
    """The name of the request's directory; None for the request's id."""
    tag: str = "default"
    """The name of the parent directory."""
    hooks: Any = None
    """Hook point -> layer selector: a list, `"all"`, or
    `{"layers": [...], "ranges": [[first, last], ...]}`."""
    positions: Any = "last_prompt"
    """A position selector."""
    layout: str | None = None
    """`"per_file"`, `"packed"` or `"sharded"`; None for the consumer's default."""
