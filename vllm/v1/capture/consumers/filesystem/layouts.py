# SPDX-License-Identifier: Apache-2.0
"""Layouts of files that are one request's own, and what all layouts share.

`per_file` has one file of rows per key with its JSON beside it, `packed` all keys of
a request in one file with an index beside it.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.filesystem.sidecar import entry, key_json, request_facts
from vllm.v1.capture.consumers.storage.codecs import Codec, parse_codec
from vllm.v1.capture.consumers.storage.encode import KeyEncoder
from vllm.v1.capture.consumers.storage.files import Workspace, publish_pair
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.native import Bytes
from vllm.v1.capture.types import CaptureFinalize, CaptureResult


@dataclass(frozen=True, slots=True)
class Writing:
    """How the rows of one request are to be written."""

    params: FilesystemParams
    workspace: Workspace
    tag: str
    name: str
    """The request's name, as a part of a path."""
    codec: Codec

    def encoder(self, finalize: CaptureFinalize) -> KeyEncoder:
        """An encoder for a key."""
        sidecar = finalize.sidecar
        dtype = getattr(torch, sidecar["dtype"])
        return KeyEncoder(self.codec, sidecar["hidden_size"], dtype)

    @property
    def max_bytes(self) -> int:
        """What one system call writes at most."""
        return self.params.coalesce_max_bytes

    def encoded(
        self, request: StoredRequest, finalize: CaptureFinalize, encoder: KeyEncoder
    ) -> Iterator[Bytes]:
        """A key's bytes, encoded as they are asked for.

        Raises:
            OSError: rows are missing.

        """
        return encoder.encode(request.blocks(finalize, self.max_bytes))

    def write_pair(
        self,
        request: StoredRequest,
        base: str,
        rows: Iterable[Bytes],
        index: Callable[[], dict[str, Any]],
    ) -> None:
        """Write `{base}.bin` and `{base}.json`, which appear together.

        Args:
            request: what the files are of; it may be given up meanwhile.
            base: the path without its ending.
            rows: the bytes of the first file.
            index: gives the content of the second, once all of `rows` were taken.

        Raises:
            OSError: neither file is there.

        """
        params, workspace = self.params, self.workspace
        asides = [workspace.write(rows, self.max_bytes, params.fsync)]
        try:
            text = json.dumps(index()).encode()
            asides.append(workspace.write([text], self.max_bytes, params.fsync))
            request.commit()
            publish_pair(
                (asides[0], f"{base}.bin"),
                (asides[1], f"{base}.json"),
                replace=params.on_collision == "overwrite",
                fsync=params.fsync,
            )
        except BaseException:
            for path in asides:
                if os.path.lexists(path):
                    os.unlink(path)
            raise


def write_per_file(
    request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
) -> None:
    """Write each key to a file of its own; a key's failure is its own."""
    folder = writing.workspace.folder(writing.tag, writing.name)
    results = []
    for finalize in finalizes:
        _, layer, hook = finalize.key
        base = f"{folder}/{layer}_{hook}"
        try:
            _write_key(request, finalize, writing, base)
        except OSError as error:
            failure = said(error, f"{base}.bin")
            results.append(CaptureResult(finalize.key, "error", failure))
        else:
            payload = [f"{base}.bin"]
            results.append(CaptureResult(finalize.key, "ok", payload=payload))
        if request.settled.is_set():  # given up: it took too long
            return
    request.settle(results)


def _write_key(
    request: StoredRequest, finalize: CaptureFinalize, writing: Writing, base: str
) -> None:
    encoder = writing.encoder(finalize)
    writing.write_pair(
        request,
        base,
        writing.encoded(request, finalize, encoder),
        lambda: key_json(writing.name, finalize.sidecar, encoder),
    )


def write_packed(
    request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
) -> None:
    """Write the request's keys one after the other to one file."""
    if not finalizes:
        request.settle(())
        return
    folder = writing.workspace.folder(writing.tag, writing.name)
    base = f"{folder}/packed{stage_suffix(finalizes[0].sidecar)}"
    shared = request_facts([finalize.sidecar for finalize in finalizes])
    entries: list[dict[str, Any]] = []
    facts = {"layout": "packed", "request_id": writing.name, **shared}
    rows = keys_in_turn(request, finalizes, writing, shared, entries, 0)
    try:
        writing.write_pair(request, base, rows, lambda: {**facts, "entries": entries})
    except OSError as error:
        request.settle_error(said(error, f"{base}.bin"))
        return
    first, *others = (finalize.key for finalize in finalizes)
    # The file is named once: the request's payload is the list of its files.
    named = CaptureResult(first, "ok", payload=[f"{base}.bin"])
    request.settle([named, *(CaptureResult(key, "ok") for key in others)])


def keys_in_turn(
    request: StoredRequest,
    finalizes: list[CaptureFinalize],
    writing: Writing,
    shared: dict[str, Any],
    entries: list[dict[str, Any]],
    offset: int,
) -> Iterator[Bytes]:
    """The bytes of all keys; adds each key's entry once its bytes were taken."""
    for finalize in finalizes:
        encoder = writing.encoder(finalize)
        yield from writing.encoded(request, finalize, encoder)
        entries.append(entry(finalize.sidecar, shared, offset, encoder))
        offset += encoder.num_bytes


def said(error: OSError, name: str) -> str:
    """Why the file `name` is not there, as results have it."""
    if isinstance(error, FileExistsError):
        return f"FileExistsError: {name} exists already (on_collision=error)"
    return f"{type(error).__name__}: {error}"


def codec_for(params: FilesystemParams, client: dict[str, Any]) -> Codec:
    """The codec that a request asked for, else the consumer's."""
    return parse_codec(client.get("codec") or params.codec, "capture.filesystem.codec")


def stage_suffix(sidecar: dict[str, Any], joint: str = "-") -> str:
    """`-pp00` where the model is spread over pipeline stages, else nothing."""
    if sidecar["pipeline_parallel_size"] == 1:
        return ""
    return f"{joint}pp{sidecar['pipeline_parallel_rank']:02d}"
