# SPDX-License-Identifier: Apache-2.0
"""Responses that carry captured rows, in the format that the client accepts.

Rows are encoded on threads and sent in pieces, so that they do not delay the responses
to other requests.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import Request

from vllm.entrypoints.serve.capture.sending import RowsResponse
from vllm.v1.capture.frontend.http import Deferred
from vllm.v1.capture.frontend.http import as_json as results_as_json
from vllm.v1.capture.transport.bodies import (
    FORMS,
    Piece,
    as_json,
    form_for,
)
from vllm.v1.capture.transport.handouts import HANDOUTS, KEPT_SECONDS, Handout
from vllm.v1.capture.transport.parts import Part, Reference, parts_of
from vllm.v1.capture.types import CaptureResult
from vllm.v1.readouts.frontend.http import Listed
from vllm.v1.residual.machine import copy_threads

_threads = ThreadPoolExecutor(max(copy_threads(), 2), "capture-answer")
_former = ThreadPoolExecutor(1, "capture-form")
"""Makes documents and heads. Each holds the interpreter for a millisecond, so that with
several threads the event loop would wait for all of them."""


def carries_rows(response: Any) -> bool:
    """Whether a response, or a streamed chunk, has rows or large readouts."""
    results = response.capture_results or {}
    rows = any(isinstance(result, Deferred) for result in results.values())
    return rows or isinstance(response.readouts, Listed)


class Document:
    """A response split into JSON fields, and rows and large readouts.

    Args:
        response: a response or chunk for which `carries_rows`, or one of kept rows.
        exclude: names of fields to leave out.
        exclude_unset: whether to leave out fields that were not set.

    """

    def __init__(
        self,
        response: Any,
        exclude: Collection[str] = (),
        exclude_unset: bool = False,
    ) -> None:
        own = {"capture_results", "readouts"} & type(response).model_fields.keys()
        self._response = response.model_dump(
            exclude=own.union(exclude), exclude_unset=exclude_unset
        )
        shown = own & response.model_fields_set if exclude_unset else own
        self._response |= dict.fromkeys(sorted(shown.difference(exclude), reverse=True))
        self._readouts = getattr(response, "readouts", None)
        self._plain: dict[str, Any] = {}
        self._results: dict[str, CaptureResult] = {}
        for name, result in (response.capture_results or {}).items():
            if isinstance(result, Deferred):
                self._results[name] = result.result
            else:
                self._plain[name] = result
        self.parts = parts_of(self._results)
        self._handout: Handout | None = None

    async def hand_out(self) -> None:
        """Copy the rows requested in shared memory to it, on a thread."""
        shared = [part for part in self.parts if part.transport == "shm"]
        if not shared:
            return
        self._handout = await _on_thread(partial(HANDOUTS.make, shared))
        if self._handout is None:
            return
        self.parts = [part for part in self.parts if part.transport != "shm"]
        # Also if this server gets no other request. The kernel frees the memory on the
        # thread that closes a file.
        loop = asyncio.get_running_loop()
        loop.call_later(KEPT_SECONDS + 1, _threads.submit, HANDOUTS.expire)

    def tell(self, reference: Reference) -> Mapping[str, Any]:
        """The whole response as JSON-serialisable data.

        Args:
            reference: makes the object that stands for a part.

        """
        handout = self._handout

        def refer(part: Part) -> dict[str, Any]:
            shared = None if handout is None else handout.refer(part)
            return reference(part) if shared is None else shared

        document = dict(self._response)
        if self._readouts is not None:
            is_large = isinstance(self._readouts, Listed)
            document["readouts"] = (
                reference(self._readouts) if is_large else self._readouts
            )
        if self._plain or self._results:
            results = {**self._plain, **results_as_json(self._results, refer)}
            document["capture_results"] = results
        return document


async def answer(
    response: Any, request: Request, headers: Mapping[str, str] | None
) -> RowsResponse:
    """The HTTP response to a request whose results carry rows."""
    document = Document(response)
    await document.hand_out()
    form = form_for(request.headers.get("accept", ""))
    make = partial(FORMS[form], document.tell, document.parts)
    body = await _on_thread(make, _former)
    sized = {} if body.size is None else {"Content-Length": str(body.size)}
    pieces = ready(body.pieces) if body.is_ready else made_on_threads(body.pieces)
    return RowsResponse(
        pieces,
        media_type=body.media_type,
        headers={**(headers or {}), **sized},
    )


async def event(
    chunk: Any, exclude: Collection[str] = (), exclude_unset: bool = False
) -> AsyncIterator[Piece]:
    """A server-sent event whose results have rows."""
    document = Document(chunk, exclude, exclude_unset)
    await document.hand_out()
    body = await _on_thread(partial(as_json, document.tell, document.parts), _former)
    yield b"data: "
    async for piece in made_on_threads(body.pieces):
        yield piece
    yield b"\n\n"


async def ready(pieces: Iterator[Piece]) -> AsyncIterator[Piece]:
    """Yield pieces that exist already: each change of threads would take longer."""
    for piece in pieces:
        if len(piece):
            yield piece


async def made_on_threads(pieces: Iterator[Piece]) -> AsyncIterator[Piece]:
    """Yield the same pieces, each produced on a thread instead of the event loop."""
    while (piece := await _on_thread(partial(next, pieces, None))) is not None:
        if len(piece):
            yield piece


async def _on_thread(
    work: Callable[[], Any], threads: ThreadPoolExecutor = _threads
) -> Any:
    return await asyncio.get_running_loop().run_in_executor(threads, work)
