# SPDX-License-Identifier: Apache-2.0
"""Where a request's rows are put: names that cannot lead out of the root."""

from typing import Any

from vllm.v1.capture.consumers.storage.files import ASIDE
from vllm.v1.capture.errors import CaptureValidationError

MAX_NAME = 200
"""Characters of a name; file systems allow 255 bytes."""


def path_part(name: Any, where: str) -> str:
    """`name` as one part of a path: other characters than `[A-Za-z0-9._-]` are `_`.

    Raises:
        CaptureValidationError: the name is empty, absolute, or leads elsewhere.

    """
    if not isinstance(name, str) or not name.strip():
        raise CaptureValidationError(
            f"{where} must be a name that is not empty",
            parameter=where,
            value=repr(name),
        )
    if name.startswith("/") or name in (".", "..") or ".." in name.split("/"):
        raise CaptureValidationError(
            f"{where} must be a plain name: neither an absolute path nor one that "
            "leads to a parent folder",
            parameter=where,
            value=repr(name),
        )
    if name == ASIDE:
        raise CaptureValidationError(
            f"{where} must not be {ASIDE!r}, which is where files grow",
            parameter=where,
            value=repr(name),
        )
    if len(name) > MAX_NAME:
        raise CaptureValidationError(
            f"{where} has {len(name)} characters; at most {MAX_NAME} are allowed",
            parameter=where,
            value=repr(name[:40] + "..."),
        )
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name
    )


def place_of(sidecar: dict[str, Any], default_tag: str) -> tuple[str, str]:
    """The tag and the request's name, as parts of a path."""
    client = sidecar.get("client_spec") or {}
    name = client.get("request_id") or sidecar["client_request_id"]
    if sidecar["num_samples"] > 1:
        name = f"{name}-{sidecar['sample_index']}"
    return (
        path_part(client.get("tag") or default_tag, "tag"),
        path_part(name, "request_id"),
    )
