# SPDX-License-Identifier: Apache-2.0
"""What the layouts share: a key's bytes as they go to a file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.storage.codecs import Codec, parse_codec
from vllm.v1.capture.consumers.storage.encode import KeyEncoder
from vllm.v1.capture.consumers.storage.files import Bytes, Workspace
from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.consumers.storage.submission import Submission
from vllm.v1.capture.types import CaptureFinalize

HELD_BYTES = 16 << 20
"""Rows up to this size are encoded as a whole before they are written."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How the rows of one request are to be written."""

    params: FilesystemParams
    workspace: Workspace
    tag: str
    name: str
    """The request's name, as a part of a path."""
    codec: Codec
    submission: Submission

    def encoder(self, finalize: CaptureFinalize) -> KeyEncoder:
        """An encoder for a key."""
        sidecar = finalize.sidecar
        dtype = getattr(torch, sidecar["dtype"])
        return KeyEncoder(self.codec, sidecar["hidden_size"], dtype)

    @property
    def replace(self) -> bool:
        """Whether files that are there already are replaced."""
        return self.params.on_collision == "overwrite"

    def fits_in_memory(self, request: StoredRequest) -> bool:
        """Whether the encoded rows may be held until they are written.

        Raw rows are, in the memory where they lie anyway.
        """
        rows = request.rows
        if rows.spilled:
            return False
        return self.codec.name == "raw" or rows.memory_bytes <= HELD_BYTES

    def placed(
        self, request: StoredRequest, data: Iterable[Bytes]
    ) -> tuple[str, list[Bytes] | None]:
        """A path aside and what is to be written there; None if it has been."""
        if self.fits_in_memory(request):
            return self.workspace.aside(), list(data)
        params = self.params
        path = self.workspace.write(data, params.coalesce_max_bytes, params.fsync)
        return path, None

    def encoded(
        self, request: StoredRequest, finalize: CaptureFinalize, encoder: KeyEncoder
    ) -> Iterator[Bytes]:
        """A key's bytes; fails if rows are missing."""
        counted = 0

        def counting() -> Iterator[torch.Tensor]:
            nonlocal counted
            for block in request.blocks(finalize, self.params.coalesce_max_bytes):
                counted += len(block)
                yield block

        yield from encoder.encode(counting())
        wanted = finalize.sidecar["num_rows"]
        if counted != wanted:
            raise OSError(f"only {counted} of {wanted} rows are there")


def codec_for(params: FilesystemParams, client: dict[str, Any]) -> Codec:
    """The codec that a request asked for, else the consumer's."""
    return parse_codec(client.get("codec") or params.codec, "capture.filesystem.codec")


def stage_suffix(sidecar: dict[str, Any], joint: str = "-") -> str:
    """`-pp00` where the model is spread over pipeline stages, else nothing."""
    if sidecar["pipeline_parallel_size"] == 1:
        return ""
    return f"{joint}pp{sidecar['pipeline_parallel_rank']:02d}"
