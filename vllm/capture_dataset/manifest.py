# SPDX-License-Identifier: Apache-2.0
"""The manifest of a data set: its content, and the progress of its collection."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.capture.errors import fail

NAME = "_manifest.json"
"""Readers of folders, such as pandas and pyarrow, skip names that begin with `_`."""
KIND = "clearbox capture data set"
FORMAT_VERSION = 1
LAYER_CONVENTION = "0-based block index"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A complete shard."""

    file: str
    """Name of the shard in the folder; `files` are the files that it consists of."""
    files: dict[str, str]
    """SHA-256 by file name."""
    first_sample: int
    stop_sample: int
    num_prompts: int
    num_rows: int
    """Number of rows over all taps."""
    num_value_bytes: int
    num_tokens: int

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "ShardFile":
        """The shard of an entry.

        Raises:
            TypeError: the entry has other fields.
            ValueError: a file is not one of the data set's folder.

        """
        shard = cls(**entry)
        for name in (shard.file, *shard.files):
            if name in ("", ".", "..") or Path(name).name != name:
                raise ValueError(f"{name!r} is no file of the folder")
        return shard


@dataclass(slots=True)
class Manifest:
    """The content of `_manifest.json`."""

    facts: dict[str, Any]
    """Model, source, columns, hook points and positions, which a resumed run must
    share."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts in which runs of one data set may differ, such as our version."""
    shards: list[ShardFile] = field(default_factory=list)
    complete: bool = False

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder.

        Raises:
            CaptureValidationError: there is no manifest, or it is not of this kind.

        """
        path = folder / NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            if content["kind"] == KIND and version == FORMAT_VERSION:
                shards = [ShardFile.of(shard) for shard in content["shards"]]
                facts, about = dict(content["facts"]), dict(content["about"])
                return cls(facts, about, shards, bool(content["complete"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise fail(
                f"folder: {str(path)!r} is not a manifest of a data set ({error})",
                "folder",
                str(folder),
            ) from None
        raise fail(
            f"folder: {str(path)!r} has the version {version!r}; this release reads "
            f"{FORMAT_VERSION}",
            "folder",
            str(folder),
        )

    def write(self, folder: Path) -> None:
        """Replace the manifest of a folder atomically."""
        counts = {
            name: sum(getattr(shard, name) for shard in self.shards)
            for name in ("num_prompts", "num_rows", "num_value_bytes", "num_tokens")
        }
        content = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "facts": self.facts,
            "about": self.about,
            "complete": self.complete,
            "counts": counts,
            "shards": [asdict(shard) for shard in self.shards],
        }
        aside = folder / f".{NAME}"
        with aside.open("w", encoding="utf-8") as opened:
            json.dump(content, opened, indent=1, ensure_ascii=False)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(aside, folder / NAME)

    def check_same(self, facts: dict[str, Any], folder: Path) -> None:
        """Refuse to resume another data set.

        Raises:
            CaptureValidationError: a fact differs; the message names the first.

        """
        plain = json.loads(json.dumps(facts))
        for name in sorted({*plain, *self.facts}):
            here, there = plain.get(name), self.facts.get(name)
            if here != there:
                raise fail(
                    f"out: {str(folder)!r} was begun with {name} {_short(there)}, and "
                    f"this run has {_short(here)}; choose another folder, or the same "
                    f"{name}",
                    "out",
                    str(folder),
                )

    def drop_missing(self, folder: Path) -> int:
        """Drop all shards from the first with missing files; returns how many."""
        for index, shard in enumerate(self.shards):
            if not all((folder / name).is_file() for name in shard.files):
                dropped = len(self.shards) - index
                del self.shards[index:]
                return dropped
        return 0


def taken(folder: Path) -> Exception:
    """The error for a folder that is not to be continued."""
    return fail(
        f"out: {str(folder)!r} holds a data set already; use --resume to continue it, "
        "or choose another folder",
        "out",
        str(folder),
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 120 else f"{text[:117]}..."


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
