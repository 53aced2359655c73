# SPDX-License-Identifier: Apache-2.0
"""Where a request's rows are put: names that cannot lead out of the root."""

from collections.abc import Mapping
from hashlib import sha256
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
    return _plain(name)


def place_of(sidecar: dict[str, Any], default_tag: str) -> tuple[str, str]:
    """The tag and the request's name, as parts of a path."""
    spec = sidecar.get("client_spec") or {}
    name = _name(spec, sidecar["client_request_id"])
    if sidecar["num_samples"] > 1:
        name = f"{name}-{sidecar['sample_index']}"
    return _tag(spec, default_tag), name


def places_of(
    spec: Mapping[str, Any], client_request_id: str, num_samples: int, default_tag: str
) -> list[str]:
    """`{tag}/{name}` of each sample of a request: two under way must share none."""
    place = f"{_tag(spec, default_tag)}/{_name(spec, client_request_id)}"
    return [place] if num_samples == 1 else [f"{place}-{n}" for n in range(num_samples)]


def _tag(spec: Mapping[str, Any], default_tag: str) -> str:
    return path_part(spec.get("tag") or default_tag, "tag")


def _name(spec: Mapping[str, Any], client_request_id: str) -> str:
    """What the request says, otherwise its id, of which a client chooses parts."""
    given = spec.get("request_id")
    return path_part(given, "request_id") if given else _made(client_request_id)


def _plain(name: str) -> str:
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name
    )


def _made(request_id: str) -> str:
    """A name for any id."""
    name = _plain(request_id)
    if len(name) > MAX_NAME:
        digest = sha256(request_id.encode(errors="backslashreplace")).hexdigest()[:16]
        return f"{name[: MAX_NAME - 17]}-{digest}"
    return f"_{name}" if name in ("", ".", "..", ASIDE) else name
