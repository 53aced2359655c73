# SPDX-License-Identifier: Apache-2.0
"""What a request says to the filesystem consumer, and how its parameters look."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.types import CaptureSpec

Layout = Literal["per_file"]
LAYOUTS: tuple[Layout, ...] = ("per_file",)

Collision = Literal["overwrite", "error"]
COLLISIONS: tuple[Collision, ...] = ("overwrite", "error")


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


@dataclass(frozen=True, kw_only=True)
class FilesystemParams:
    """The consumer's parameters, as `--capture-consumers filesystem:...` gives them."""

    root: Path
    """The folder below which everything is written."""
    layout: Layout = "per_file"
    on_collision: Collision = "overwrite"
    """What happens when a file is there already."""
    fsync: bool = False
    """Whether a file is forced to the disk before it gets its name."""
    buffer_bytes: int = 1 << 20
    """How many bytes of a key are collected before they are written."""
    spec: CaptureSpec | None = None
    """What is captured of every request."""
    default_tag: str = "default"
    """The tag of requests that name none."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "FilesystemParams":
        """The parameters that a dictionary stands for.

        Raises:
            CaptureValidationError: naming the parameter, the value, the remedy.

        """
        values = dict(raw)
        hooks = values.pop("global_hooks", None)
        positions = values.pop("global_positions", "last_prompt")
        known = {field.name for field in fields(cls)} - {"spec"}
        for name in values:
            if name not in known:
                raise _wrong(
                    name,
                    values[name],
                    "there is no such parameter; there are "
                    f"{sorted(known | {'global_hooks', 'global_positions'})}",
                )
        if not isinstance(values.get("root"), (str, Path)) or not values["root"]:
            raise _wrong(
                "root",
                values.get("root"),
                "it must name the folder to write to, as in filesystem:root=/data",
            )
        values["root"] = Path(values["root"]).expanduser().absolute()
        _choice(values, "layout", LAYOUTS)
        _choice(values, "on_collision", COLLISIONS)
        if not isinstance(values.get("fsync", False), bool):
            raise _wrong("fsync", values["fsync"], "it must be true or false")
        buffer = values.get("buffer_bytes", 1)
        if isinstance(buffer, bool) or not isinstance(buffer, int) or buffer < 1:
            raise _wrong("buffer_bytes", buffer, "it must be a whole number above 0")
        if "default_tag" in values:
            values["default_tag"] = path_part(
                values["default_tag"], "capture_consumers.filesystem.default_tag"
            )
        spec = CaptureSpec(hooks, positions) if hooks is not None else None
        return cls(**values, spec=spec)


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
    if len(name) > 200:
        raise CaptureValidationError(
            f"{where} has {len(name)} characters; at most 200 are allowed",
            parameter=where,
            value=repr(name[:40] + "..."),
        )
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name
    )


def _choice(values: dict[str, Any], name: str, allowed: tuple[str, ...]) -> None:
    if name in values and values[name] not in allowed:
        raise _wrong(name, values[name], f"it must be one of {list(allowed)}")


def _wrong(name: str, value: Any, remedy: str) -> CaptureValidationError:
    where = f"capture_consumers.filesystem.{name}"
    return CaptureValidationError(
        f"{where}={value!r}: {remedy}", parameter=where, value=value
    )
