# SPDX-License-Identifier: Apache-2.0
"""Layout `per_file`: `{tag}/{request_id}/{layer}_{hook}.bin` with a `.json`."""

import contextlib
import os
from pathlib import Path

from vllm.v1.capture.consumers.filesystem.layout import Writing
from vllm.v1.capture.consumers.filesystem.sidecar import key_json
from vllm.v1.capture.consumers.storage.files import publish
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.types import CaptureFinalize, CaptureResult


def write_per_file(
    request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
) -> list[CaptureResult]:
    """Write each key to a file of its own; a key's failure is its own."""
    results = []
    folder = writing.workspace.folder(writing.tag, writing.name)
    for finalize in finalizes:
        if request.settled.is_set():  # given up: it took too long
            break
        try:
            path = _write(request, finalize, writing, folder)
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
            results.append(CaptureResult(finalize.key, "error", message))
        else:
            results.append(CaptureResult(finalize.key, "ok", payload=[path]))
    return results


def _write(
    request: StoredRequest, finalize: CaptureFinalize, writing: Writing, folder: Path
) -> str:
    params, workspace = writing.params, writing.workspace
    _, layer, hook = finalize.key
    base = f"{folder}/{layer}_{hook}"
    replace = params.on_collision == "overwrite"
    encoder = writing.encoder(finalize)
    rows = workspace.write(
        writing.encoded(request, finalize, encoder),
        params.coalesce_max_bytes,
        params.fsync,
    )
    text = key_json(writing.name, finalize.sidecar, encoder.describe())
    publish_pair(writing, rows, f"{base}.bin", text, f"{base}.json", replace)
    return f"{base}.bin"


def publish_pair(
    writing: Writing, rows: str, final: str, text: bytes, index: str, replace: bool
) -> None:
    """Publish rows and then what describes them; neither stays without the other.

    Raises:
        FileExistsError: there are such rows, and they are not to be replaced.

    """
    fsync = writing.params.fsync
    try:
        aside = writing.workspace.write([text], len(text), fsync)
    except BaseException:
        os.unlink(rows)
        raise
    try:
        if replace and os.path.lexists(final):
            # A reader must not find old facts beside new rows.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(index)
        publish(rows, final, replace=replace, fsync=False)
    except FileExistsError:
        os.unlink(aside)
        raise FileExistsError(f"{final} exists already (on_collision=error)") from None
    except BaseException:
        os.unlink(aside)
        raise
    try:
        publish(aside, index, replace=True, fsync=fsync)
    except BaseException:
        os.unlink(final)
        raise
