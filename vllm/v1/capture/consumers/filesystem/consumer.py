# SPDX-License-Identifier: Apache-2.0
"""Rows to files: `{root}/{tag}/{request_id}/{layer}_{hook}.bin` with a `.json`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from vllm.logger import init_logger
from vllm.v1.capture.consumers.filesystem.files import (
    GrowingFile,
    publish_json,
    raw_bytes,
)
from vllm.v1.capture.consumers.filesystem.types import (
    LAYOUTS,
    FilesystemParams,
    path_part,
)
from vllm.v1.capture.selectors import fail, parse_spec, plain
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureContext,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    CaptureSpec,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

WHERE = "capture.filesystem"

SIDECAR = (
    "layer",
    "hook",
    "dtype",
    "layer_convention",
    "model",
    "positions",
    "token_ids",
    "num_prompt_tokens",
    "num_generated_tokens",
    "finish_reason",
    "vllm_internal_request_id",
    "client_request_id",
    "sample_index",
    "pipeline_parallel_rank",
    "pipeline_parallel_size",
)


class FilesystemConsumer:
    """Streams each key's rows into a file of its own (layout `per_file`).

    A `CaptureSink`; a file gets its final name when the request has ended. The
    result's payload is the list of paths of the `.bin` files.
    """

    location: Literal["worker", "driver"] = "worker"
    reads_client_spec: ClassVar[bool] = True
    truncates: ClassVar[bool] = True

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        self._params = FilesystemParams.parse(params)
        self._files: dict[CaptureKey, GrowingFile] = {}
        self._failed: dict[CaptureKey, str] = {}
        self._results: dict[CaptureKey, CaptureResult] = {}

    def global_capture_spec(self) -> CaptureSpec | None:
        """What `global_hooks` and `global_positions` say."""
        return self._params.spec

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """A `FilesystemCaptureRequest`, or the same as a dict."""
        raw = plain(raw)
        spec = parse_spec(raw, ctx, WHERE, ("request_id", "tag", "layout"))
        for name in ("request_id", "tag"):
            if raw.get(name) is not None:
                path_part(raw[name], f"{WHERE}.{name}")
        layout = raw.get("layout")
        if layout is not None and layout not in LAYOUTS:
            raise fail(
                f"{WHERE}.layout must be one of {list(LAYOUTS)}",
                f"{WHERE}.layout",
                layout,
            )
        return spec

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        """Append the rows to the key's file."""
        key = chunk.key
        if key in self._failed:
            return
        file = self._files.get(key)
        if file is None:
            folder = self._params.root / ".incomplete"
            file = GrowingFile(folder, key, self._params.buffer_bytes)
            self._files[key] = file
        try:
            file.append(raw_bytes(chunk.tensor))
        except OSError as error:
            self._fail(key, error)

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        """Give the key's file its name, with a sidecar beside it."""
        key, sidecar = finalize.key, finalize.sidecar
        if sidecar.get("capture_error"):
            self._failed.setdefault(key, sidecar["capture_error"])
        if key not in self._failed:
            try:
                path = self._publish(key, sidecar)
                self._results[key] = CaptureResult(key, "ok", payload=[str(path)])
            except OSError as error:
                self._fail(key, error)
        file = self._files.pop(key, None)
        if key in self._failed:
            if file is not None:
                self._remove(file)
            self._results[key] = CaptureResult(key, "error", self._failed.pop(key))

    def get_result(self, key: CaptureKey) -> CaptureResult | None:
        """The key's result; it is given once."""
        return self._results.pop(key, None)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Remove what never became complete."""
        for key, file in self._files.items():
            logger.error("The capture of %s did not end; its rows are removed", key)
            self._remove(file)
        self._files.clear()

    def _publish(self, key: CaptureKey, sidecar: dict[str, Any]) -> Path:
        _, layer, hook = key
        folder = self._folder(sidecar)
        final = folder / f"{layer}_{hook}.bin"
        if self._params.on_collision == "error" and final.exists():
            raise FileExistsError(f"{final} exists already (on_collision=error)")
        file = self._files.get(key)
        if file is None:  # The request ended without a row of this key.
            file = GrowingFile(self._params.root / ".incomplete", key, 1)
            self._files[key] = file
        shape = [sidecar["num_rows"], sidecar["hidden_size"]]
        itemsize = _itemsize(sidecar["dtype"])
        file.publish(final, shape[0] * shape[1] * itemsize, self._params.fsync)
        content = {
            "request_id": folder.name,
            "shape": shape,
            **{name: sidecar[name] for name in SIDECAR},
        }
        if "capture_note" in sidecar:
            content["note"] = sidecar["capture_note"]
        try:
            publish_json(final.with_suffix(".json"), content, self._params.fsync)
        except OSError:
            final.unlink(missing_ok=True)
            raise
        return final

    def _folder(self, sidecar: dict[str, Any]) -> Path:
        client = sidecar.get("client_spec") or {}
        tag = client.get("tag") or self._params.default_tag
        name = client.get("request_id") or sidecar["client_request_id"]
        if sidecar["num_samples"] > 1:
            name = f"{name}-{sidecar['sample_index']}"
        return (
            self._params.root
            / path_part(tag, f"{WHERE}.tag")
            / path_part(name, f"{WHERE}.request_id")
        )

    def _fail(self, key: CaptureKey, error: OSError) -> None:
        logger.error("Writing the capture of %s failed: %s", key, error)
        self._failed[key] = f"{type(error).__name__}: {error}"

    def _remove(self, file: GrowingFile) -> None:
        try:
            file.discard()
        except OSError as error:
            logger.error("A partial file could not be removed: %s", error)


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
