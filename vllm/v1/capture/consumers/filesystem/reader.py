# SPDX-License-Identifier: Apache-2.0
"""Reading captured rows back from files."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from vllm.v1.capture.consumers.filesystem.entries import (
    CaptureEntry,
    PerFile,
    entries_of,
)
from vllm.v1.capture.consumers.filesystem.file_names import (
    OWN,
    PACKED,
    SHARD,
    indices_in,
)
from vllm.v1.capture.consumers.storage.codecs import codec_of
from vllm.v1.capture.consumers.storage.encode import crc32c
from vllm.v1.capture.plan import Tap


def read_per_file(path: str | Path) -> PerFile:
    """The rows of one key and their sidecar.

    Args:
        path: the `.bin` file, or its `.json`.

    Returns:
        A pair: a tensor `[rows, hidden_size]` in the dtype that was captured, and the
        sidecar. It has the attributes of a `CaptureEntry` as well.

    Raises:
        FileNotFoundError: the file or its sidecar is not there.
        ValueError: the file's size is not what the sidecar says.

    """
    path = Path(path)
    sidecar = load_index(path)
    return PerFile(_file_of_one(path, sidecar), sidecar)


def read_packed(path: str | Path) -> Any:
    """The rows of one `packed` file by `(layer, hook)`, and its index.

    Args:
        path: the `.bin` file, or its `.json`; or the request's folder.

    Returns:
        For a file `({(layer, hook): tensor}, index)`. For a folder, whose stages are
        joined, `{(layer, hook): CaptureEntry}`.

    Raises:
        FileNotFoundError: the file or its index is not there.
        ValueError: the file is shorter than the index says.

    """
    path = Path(path)
    if path.is_dir():
        found = [(p, load_index(p)) for p in indices_in(path, PACKED)]
        if not found:
            raise FileNotFoundError(f"no packed file in {path}")
        rows: dict[Tap, torch.Tensor] = {}
        for file, index in found:
            rows |= _file_of_several(file, index)
        return entries_of(rows)
    index = load_index(path)
    return _file_of_several(path, index), index


@overload
def read_sharded(root: str | Path) -> dict[str, dict[Tap, CaptureEntry]]: ...
@overload
def read_sharded(
    root: str | Path, tag: str, request_id: str
) -> dict[Tap, torch.Tensor]: ...
def read_sharded(
    root: str | Path, tag: str | None = None, request_id: str | None = None
) -> Any:
    """The rows in the shards of a tag.

    Of several requests with one id the one in the latest shard counts. Shards of an
    earlier public fork do not tell them apart: there the rows of an id are joined.

    Args:
        root: of the consumer; alone, the folder of a tag.
        tag: of the request.
        request_id: of the request.

    Returns:
        Of one request `{(layer, hook): tensor}`; of the folder of a tag
        `{request id: {(layer, hook): CaptureEntry}}`.

    Raises:
        FileNotFoundError: no shard has rows of this request.
        ValueError: a shard is shorter than its index says.

    """
    if tag is None or request_id is None:
        shards = list(shard_indices(Path(root)))
        names = {e["request_id"]: None for _, index in shards for e in index["entries"]}
        return {name: entries_of(_rows_of(name, shards)) for name in names}
    rows = _rows_of(request_id, shard_indices(Path(root) / tag))
    if not rows:
        raise FileNotFoundError(
            f"no shard in {Path(root) / tag} has rows of {request_id!r}"
        )
    return rows


def _rows_of(
    request_id: str, shards: Iterable[tuple[Path, dict[str, Any]]]
) -> dict[Tap, torch.Tensor]:
    """The rows of one request, from shards in the order of their making."""
    rows: dict[Tap, torch.Tensor] = {}
    for path, index in shards:
        entries = [e for e in index["entries"] if e["request_id"] == request_id]
        if not entries:
            continue
        requests = index.get("requests")
        if requests is None:
            for tap, more in _read_entries(path, entries, index["dtype"]).items():
                rows[tap] = torch.cat([rows[tap], more]) if tap in rows else more
            continue
        # Later ones replace earlier ones, whole requests at a time.
        latest = max(entry["request"] for entry in entries)
        mine = [entry for entry in entries if entry["request"] == latest]
        rows |= _read_entries(path, mine, requests[latest]["dtype"])
    return rows


@overload
def read_request(root: str | Path) -> dict[Tap, CaptureEntry]: ...
@overload
def read_request(
    root: str | Path, tag: str, request_id: str
) -> dict[Tap, torch.Tensor]: ...
def read_request(
    root: str | Path, tag: str | None = None, request_id: str | None = None
) -> Any:
    """All rows of one request by `(layer, hook)`, in whatever layout they are.

    Of several requests that were written under this name the latest counts.

    Args:
        root: of the consumer; alone, the request's folder.
        tag: of the request.
        request_id: of the request.

    Returns:
        Tensors; for a request's folder, a `CaptureEntry` each.

    Raises:
        FileNotFoundError: nothing was captured under this tag and id.
        ValueError: a file's size is not what its index says.

    """
    if tag is None or request_id is None:
        folder = Path(root)
        rows = read_request(folder.parent.parent, folder.parent.name, folder.name)
        return entries_of(rows)
    folder = Path(root) / tag / request_id
    found: dict[Tap, torch.Tensor] = {}
    own = own_indices(folder)
    for path, index in [] if _has_newer_shard(folder, own) else own:
        if "entries" in index:
            found |= _file_of_several(path, index)
        else:
            found[index["layer"], index["hook"]] = _file_of_one(path, index)
    if found:
        return found
    try:
        return read_sharded(root, tag, request_id)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no capture of {request_id!r} under {folder.parent}"
        ) from None


def _has_newer_shard(folder: Path, own: Sequence[tuple[Path, Any]]) -> bool:
    """Whether a shard beside a request's folder has later rows of its name."""
    written = max((path.stat().st_mtime_ns for path, _ in own), default=0)
    for path in reversed(indices_in(folder.parent, SHARD)):
        if path.stat().st_mtime_ns <= written:
            return False
        if any(e["request_id"] == folder.name for e in load_index(path)["entries"]):
            return True
    return False


def _file_of_one(path: Path, sidecar: dict[str, Any]) -> torch.Tensor:
    """The rows of the `.bin` file beside a sidecar."""
    path = path.with_suffix(".bin")
    data = bytearray(path.read_bytes())
    return decode(data, sidecar, sidecar["dtype"], str(path))


def _file_of_several(path: Path, index: dict[str, Any]) -> dict[Tap, torch.Tensor]:
    """The rows of the `.bin` file beside an index of several entries."""
    return _read_entries(path, index["entries"], index["dtype"])


def _read_entries(
    path: Path, entries: Sequence[dict[str, Any]], dtype: str
) -> dict[Tap, torch.Tensor]:
    """The rows of some entries of one file; those of one key are joined.

    An earlier public fork writes an entry per chunk of a prompt and per step.
    """
    parts: dict[Tap, list[torch.Tensor]] = {}
    with open(path.with_suffix(".bin"), "rb") as file:
        for entry in sorted(entries, key=lambda one: int(one["offset"])):
            rows = _read_entry(file, entry, dtype)
            parts.setdefault((entry["layer"], entry["hook"]), []).append(rows)
    return {
        tap: several[0] if len(several) == 1 else torch.cat(several)
        for tap, several in parts.items()
    }


def load_index(path: Path) -> dict[str, Any]:
    """The JSON beside a `.bin` file."""
    index: dict[str, Any] = json.loads(
        path.with_suffix(".json").read_text(encoding="utf-8")
    )
    return index


def own_indices(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files of a folder with their indices: those of the request written last.

    Files that an earlier request of the same name has left may be of other layers.
    """
    found = [(path, load_index(path)) for path in indices_in(folder, OWN)]
    if not found:
        return []

    def request(index: dict[str, Any]) -> Any:
        return index.get("vllm_internal_request_id")

    _, latest = found[-1]
    same = [one for one in found if request(one[1]) == request(latest)]
    return sorted(same, key=lambda one: one[0])


def shard_indices(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The shards of a tag with their indices, in the order of their making."""
    for path in indices_in(folder, SHARD):
        yield path, load_index(path)


def decode(
    data: bytes | bytearray | memoryview,
    entry: dict[str, Any],
    dtype_name: str,
    where: str,
) -> torch.Tensor:
    """The rows of one key from its bytes.

    Raises:
        ValueError: there are more or fewer bytes than the entry says, or others.

    """
    dtype = getattr(torch, dtype_name.removeprefix("torch."))
    num_rows, width = entry["shape"]
    description = entry.get("codec", {"name": "raw"})
    codec = codec_of(description)
    row_bytes = codec.row_bytes(width, dtype)
    blocks = description.get("blocks")
    if blocks is None:
        assert row_bytes is not None, f"{where} has no list of blocks"
        blocks = [(num_rows, num_rows * row_bytes)]
    expected = sum(size for _, size in blocks)
    if len(data) != expected:
        raise ValueError(
            f"{where} has {len(data)} bytes, but {num_rows} rows of {width} "
            f"{dtype_name} values have {expected} ({description['name']})"
        )
    stored = entry.get("crc32c")
    found = None if stored is None else crc32c(data)
    if found not in (None, stored):
        raise ValueError(f"{where} is damaged: CRC32C is {found}, was {stored}")
    view, start, parts = memoryview(data), 0, []
    for count, size in blocks:
        part = view[start : start + size]
        parts.append(codec.reconstruct(part, count, width, dtype))
        start += size
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, width, dtype=dtype)


def _read_entry(file: Any, entry: dict[str, Any], dtype_name: str) -> torch.Tensor:
    file.seek(entry["offset"])
    data = bytearray(file.read(entry["nbytes"]))
    where = f"{file.name} at {entry['offset']}"
    return decode(data, entry, dtype_name, where)
