# SPDX-License-Identifier: Apache-2.0
"""Functions that read captured rows from the files of the consumer `filesystem`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from crc32c import crc32c

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
from vllm.v1.residual.tap import Tap


def read_per_file(path: str | Path) -> PerFile:
    """Read the rows of one key (layout `per_file`).

    Args:
        path: the `.bin` file, or its `.json` file.

    Returns:
        A pair of a tensor `[rows, hidden_size]` in the captured dtype and the sidecar,
        with the fields of a `CaptureEntry` in addition.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: the file does not match the sidecar in size or checksum.

    """
    path = Path(path)
    sidecar = load_index(path)
    return PerFile(_file_of_one(path, sidecar), sidecar)


def read_packed(path: str | Path) -> Any:
    """Read all keys of a request (layout `packed`).

    Args:
        path: the `.bin` file, its `.json` file, or the request's directory.

    Returns:
        For a file, `({(layer, hook): tensor}, index)`. For a directory, with the files
        of all pipeline stages, `{(layer, hook): CaptureEntry}`.

    Raises:
        FileNotFoundError: the file or its index is missing.
        ValueError: the file does not match the index in size or checksum.

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
    """Read rows from the shards of a tag (layout `sharded`).

    If several requests have the same id, the latest one is read. Shards written by an
    earlier public fork do not distinguish them; there, all rows of an id are joined.

    Args:
        root: the consumer's root; without the other arguments, the directory of a tag.
        tag: the tag of the request.
        request_id: the name of the request.

    Returns:
        For one request, `{(layer, hook): tensor}`; for a directory,
        `{request id: {(layer, hook): CaptureEntry}}`.

    Raises:
        FileNotFoundError: no shard has rows of this request.
        ValueError: a shard does not match its index in size or checksum.

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
    """The rows of one request, from shards in the order in which they were written."""
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
        # Within a shard, the latest request with this id replaces earlier ones.
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
    """Read all rows of one request, in any layout.

    If several requests were written under this name, the latest one is read.

    Args:
        root: the consumer's root; without the other arguments, the directory of the
            request.
        tag: the tag of the request.
        request_id: the name of the request.

    Returns:
        `{(layer, hook): tensor}` with tensors `[rows, hidden_size]`; for a directory,
        `{(layer, hook): CaptureEntry}`.

    Raises:
        FileNotFoundError: nothing was captured under this tag and name.
        ValueError: a file does not match its index in size or checksum.

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
    """Whether a shard of the same tag has later rows under the request's name."""
    written = max((path.stat().st_mtime_ns for path, _ in own), default=0)
    for path in reversed(indices_in(folder.parent, SHARD)):
        if path.stat().st_mtime_ns <= written:
            return False
        if any(e["request_id"] == folder.name for e in load_index(path)["entries"]):
            return True
    return False


def _file_of_one(path: Path, sidecar: dict[str, Any]) -> torch.Tensor:
    """Read the `.bin` file of one key."""
    path = path.with_suffix(".bin")
    data = bytearray(path.read_bytes())
    return decode(data, sidecar, sidecar["dtype"], str(path))


def _file_of_several(path: Path, index: dict[str, Any]) -> dict[Tap, torch.Tensor]:
    """Read the `.bin` file of an index with several entries."""
    return _read_entries(path, index["entries"], index["dtype"])


def _read_entries(
    path: Path, entries: Sequence[dict[str, Any]], dtype: str
) -> dict[Tap, torch.Tensor]:
    """Read some entries of one file, joining those of the same key.

    An earlier public fork writes a separate entry for each prefill chunk and step.
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
    """Load the JSON file that belongs to a `.bin` file."""
    index: dict[str, Any] = json.loads(
        path.with_suffix(".json").read_text(encoding="utf-8")
    )
    return index


def own_indices(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files in a request's directory with their indices, sorted by path.

    Only those of the latest request: an earlier one of the same name may have left
    files of other layers.
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
    """Yield the shards of a tag with their indices, by ascending modification time."""
    for path in indices_in(folder, SHARD):
        yield path, load_index(path)


def decode(
    data: bytearray, entry: dict[str, Any], dtype_name: str, where: str
) -> torch.Tensor:
    """The rows `[rows, hidden_size]` of one key, in the memory of `data`.

    Args:
        data: the bytes of the key.
        entry: the key's entry or sidecar, with `shape` and `crc32c`.
        dtype_name: the captured dtype.
        where: the file's name in messages.

    Raises:
        ValueError: the size or the checksum of `data` differs from the entry.

    """
    check_raw(entry, where)
    dtype = getattr(torch, dtype_name.removeprefix("torch."))
    num_rows, width = entry["shape"]
    expected = num_rows * width * dtype.itemsize
    if len(data) != expected:
        raise ValueError(
            f"{where} has {len(data)} bytes, but {num_rows} rows of {width} "
            f"{dtype_name} values have {expected}"
        )
    stored = entry.get("crc32c")  # Earlier builds could not always compute it.
    if stored is not None and (found := crc32c(data)) != stored:
        raise ValueError(f"{where} is damaged: CRC32C is {found}, was {stored}")
    return rows_in(data, (num_rows, width), dtype)


def check_raw(entry: dict[str, Any], where: str) -> None:
    """Refuse rows that an earlier build has encoded.

    Raises:
        ValueError: naming the file.

    """
    name = entry.get("codec", {"name": "raw"})["name"]
    if name != "raw":
        raise ValueError(
            f"{where} is encoded ({name}); read it with the version that wrote it"
        )


def rows_in(
    data: bytearray | memoryview, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Writable memory as rows of `shape`, which may be empty."""
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def _read_entry(file: Any, entry: dict[str, Any], dtype_name: str) -> torch.Tensor:
    file.seek(entry["offset"])
    data = bytearray(file.read(entry["nbytes"]))
    where = f"{file.name} at {entry['offset']}"
    # The results of readouts have dtypes of their own.
    return decode(data, entry, entry.get("dtype", dtype_name), where)
