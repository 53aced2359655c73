# SPDX-License-Identifier: Apache-2.0
"""Paths of a request's files, made from names that cannot lead out of the root."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from vllm.v1.capture.consumers.storage.files import ASIDE
from vllm.v1.capture.errors import CaptureValidationError

MAX_NAME = 200
"""Maximum number of characters of a name; file systems allow 255 bytes."""


def path_part(name: Any, where: str) -> str:
    """Convert `name` to one part of a path; only `[A-Za-z0-9._-]` is kept, else `_`.

    Raises:
        CaptureValidationError: the name is empty, too long, reserved, an absolute path,
            or refers to a parent directory.

    """
    if not isinstance(name, str) or not name.strip():
        raise CaptureValidationError(
            f"{where} must be a name that is not empty",
            parameter=where,
            value=repr(name),
        )
    if name.startswith("/") or name in (".", "..") or ".." in name.split("/"):
        raise CaptureValidationError(
            f"{where} must be a plain name: neither an absolute path nor a path to a "
            "parent folder",
            parameter=where,
            value=repr(name),
        )
    if name == ASIDE:
        raise CaptureValidationError(
            f"{where} must not be {ASIDE!r}, the folder of unfinished files",
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
    """The tag and the name of the sample that a sidecar describes, as path parts."""
    spec = sidecar.get("client_spec") or {}
    name = _name(spec, sidecar["client_request_id"])
    if sidecar["num_samples"] > 1:
        name = f"{name}-{sidecar['sample_index']}"
    return _tag(spec, default_tag), name


def places_of(
    spec: Mapping[str, Any], client_request_id: str, num_samples: int, default_tag: str
) -> list[str]:
    """The paths `{tag}/{name}` of a request's samples.

    Two requests in flight must not share one; see `PathLocks`.
    """
    place = f"{_tag(spec, default_tag)}/{_name(spec, client_request_id)}"
    return [place] if num_samples == 1 else [f"{place}-{n}" for n in range(num_samples)]


def _tag(spec: Mapping[str, Any], default_tag: str) -> str:
    return path_part(spec.get("tag") or default_tag, "tag")


def _name(spec: Mapping[str, Any], client_request_id: str) -> str:
    """The `request_id` in the spec, otherwise a name made from the request's id."""
    given = spec.get("request_id")
    return path_part(given, "request_id") if given else _made(client_request_id)


def _plain(name: str) -> str:
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name
    )


def _made(request_id: str) -> str:
    """A valid name for any request id."""
    name = _plain(request_id)
    if len(name) > MAX_NAME:
        digest = sha256(request_id.encode(errors="backslashreplace")).hexdigest()[:16]
        return f"{name[: MAX_NAME - 17]}-{digest}"
    return f"_{name}" if name in ("", ".", "..", ASIDE) else name
