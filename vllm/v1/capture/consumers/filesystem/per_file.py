# SPDX-License-Identifier: Apache-2.0
"""Layout `per_file`: one file of rows per key, with its JSON beside it."""

from vllm.v1.capture.consumers.filesystem.layouts import Writing
from vllm.v1.capture.consumers.filesystem.sidecar import key_json
from vllm.v1.capture.consumers.storage.files import Bytes
from vllm.v1.capture.consumers.storage.jobs import Publication
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.consumers.storage.submission import Gathering
from vllm.v1.capture.consumers.storage.writers import Answer
from vllm.v1.capture.types import CaptureFinalize, CaptureKey, CaptureResult


def write_per_file(
    request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
) -> None:
    """Have each key written to a file of its own; a key's failure is its own."""
    if not finalizes:
        request.settle(())
        return
    results: list[CaptureResult] = []
    gathering = Gathering(len(finalizes), lambda: request.settle(results))

    def answered(key: CaptureKey, name: str) -> Answer:
        def answer(error: OSError | None) -> None:
            results.append(result_of(key, name, error))
            gathering.arrived()

        return answer

    folder = writing.workspace.folder(writing.tag, writing.name)
    for finalize in finalizes:
        if request.settled.is_set():  # given up: it took too long
            return
        _, layer, hook = finalize.key
        base = f"{folder}/{layer}_{hook}"
        answer = answered(finalize.key, f"{base}.bin")
        try:
            writing.submission.submit(_job(request, finalize, writing, base), answer)
        except OSError as error:
            answer(error)


def result_of(key: CaptureKey, name: str, error: OSError | None) -> CaptureResult:
    """What a writer's answer means for a key whose file is `name`."""
    if error is None:
        return CaptureResult(key, "ok", payload=[name])
    return CaptureResult(key, "error", said(error, name))


def said(error: OSError, name: str) -> str:
    """Why the file `name` is not there, as results have it."""
    if isinstance(error, FileExistsError):
        return f"FileExistsError: {name} exists already (on_collision=error)"
    return f"{type(error).__name__}: {error}"


def _job(
    request: StoredRequest, finalize: CaptureFinalize, writing: Writing, base: str
) -> Publication:
    encoder = writing.encoder(finalize)
    aside, rows = writing.placed(request, writing.encoded(request, finalize, encoder))
    return publication(
        writing, aside, rows, base, key_json(writing.name, finalize.sidecar, encoder)
    )


def publication(
    writing: Writing,
    aside: str,
    rows: list[Bytes] | None,
    base: str,
    index: bytes,
) -> Publication:
    """The job that makes `{base}.bin` and `{base}.json`."""
    return Publication(
        rows_aside=aside,
        rows_name=f"{base}.bin",
        rows=rows,
        index_aside=writing.workspace.aside(),
        index_name=f"{base}.json",
        index=index,
        replace=writing.replace,
        fsync=writing.params.fsync,
    )
