# SPDX-License-Identifier: Apache-2.0
"""`FilesystemConsumer`, which writes rows to files in one of three layouts."""

from typing import Any
from zlib import crc32

from vllm.v1.capture.consumers.filesystem.layouts import (
    FileShard,
    Writing,
    stage_suffix,
    write_packed,
    write_per_file,
)
from vllm.v1.capture.consumers.filesystem.params import FilesystemParams
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS
from vllm.v1.capture.consumers.storage.codecs import parse_codec
from vllm.v1.capture.consumers.storage.consumer import FilesConsumer
from vllm.v1.capture.consumers.storage.files import (
    Workspace,
    place_of,
    places_of,
    sole_writer,
)
from vllm.v1.capture.consumers.storage.shards import ShardKey
from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.errors import fail
from vllm.v1.capture.types import CaptureContext, CaptureFinalize, CaptureSpec


class FilesystemConsumer(FilesConsumer):
    """Writes the rows of each request to files once it has ended.

    A `CaptureSink`. The result's payload is the list of paths of the `.bin` files,
    which are complete when the result is returned. For the formats see
    `docs/capture/files.md`.
    """

    params_class = FilesystemParams
    _params: FilesystemParams
    more_keys = ("layout", "codec")

    def _check(
        self, raw: dict[str, Any], spec: CaptureSpec, ctx: CaptureContext, where: str
    ) -> None:
        """Check the layout and the codec."""
        layout = raw.get("layout")
        if layout is not None and layout not in LAYOUTS:
            raise fail(
                f"{where}.layout must be one of {list(LAYOUTS)}",
                f"{where}.layout",
                layout,
            )
        if raw.get("codec") is not None:
            parse_codec(raw["codec"], f"{where}.codec")

    def claimed_places(self, raw: Any, request_id: str, num_samples: int) -> list[str]:
        """The paths that a request's rows are written to; see `PathLocks`."""
        return places_of(raw, request_id, num_samples, self._params.default_tag)

    def publish(
        self,
        request: StoredRequest,
        finalizes: list[CaptureFinalize],
        workspace: Workspace,
    ) -> None:
        """Write the rows of a request."""
        sidecar = finalizes[0].sidecar
        client = sidecar.get("client_spec") or {}
        layout = client.get("layout") or self._params.default_layout
        tag, name = place_of(sidecar, self._params.default_tag)
        codec = parse_codec(
            client.get("codec") or self._params.codec, "capture.filesystem.codec"
        )
        writing = Writing(self._params, workspace, tag, name, codec)
        if layout == "sharded":
            self._append(request, finalizes, writing)
            return
        folder = workspace.folder(tag, name)
        write = write_packed if layout == "packed" else write_per_file
        with sole_writer(folder):
            write(request, finalizes, writing, folder)

    def _append(
        self, request: StoredRequest, finalizes: list[CaptureFinalize], writing: Writing
    ) -> None:
        """Append the request to a shard, which settles it when it is sealed."""
        params, shards = self._params, self._params.num_shards
        first = crc32(request.request_id.encode())
        prefix = f"shard{stage_suffix(finalizes[0].sidecar)}"

        def new(key: ShardKey) -> FileShard:
            name = f"{prefix}-{key[1]:03d}"
            return FileShard(params, writing.workspace, writing.tag, name)

        self._shards.add(
            # A file system lets one thread at a time write to a file.
            [(writing.tag, (first + n) % shards) for n in range(shards)],
            new,
            lambda shard: shard.append(request, finalizes, writing),
        )
