# SPDX-License-Identifier: Apache-2.0
"""A consumer that only holds rows, to measure capture without a sink's work.

It keeps each request's rows in the worker's memory until the request ends. The
result of a key is its number of rows.
`plug_in` makes the consumer available to engines without installing anything.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from vllm.v1.capture.types import (
        CaptureChunk,
        CaptureContext,
        CaptureFinalize,
        CaptureKey,
        CaptureResult,
        CaptureSpec,
    )

NAME = "host_memory"
ROOT = Path(__file__).resolve().parents[2]


class HostMemory:
    """A `CaptureSink` whose client spec is `{"hooks": ..., "positions": ...}`."""

    location = "worker"
    reads_client_spec: ClassVar[bool] = True
    remembers_specs: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, params: dict[str, Any]) -> None:
        self._rows: defaultdict[CaptureKey, list[torch.Tensor]] = defaultdict(list)
        self._counts: defaultdict[CaptureKey, int] = defaultdict(int)
        self._results: dict[CaptureKey, CaptureResult] = {}

    def validate_client_spec(self, raw: Any, ctx: "CaptureContext") -> "CaptureSpec":
        """Accept the usual spec."""
        from vllm.v1.capture.selectors import parse_spec

        return parse_spec(raw, ctx, f"capture.{NAME}")

    def submit_chunk(self, chunk: "CaptureChunk") -> None:
        """Keep the rows."""
        self._counts[chunk.key] += len(chunk.tensor)
        self._rows[chunk.key].append(chunk.tensor)

    def submit_chunk_batch(self, chunks: "Sequence[CaptureChunk]") -> None:
        """As `submit_chunk`, for all chunks of a step."""
        for chunk in chunks:
            self.submit_chunk(chunk)

    def submit_finalize(self, finalize: "CaptureFinalize") -> None:
        """Drop the key's rows."""
        from vllm.v1.capture.types import CaptureResult

        key = finalize.key
        self._rows.pop(key, None)
        count = [self._counts.pop(key, 0)]
        self._results[key] = CaptureResult(key, "ok", payload=count)

    def get_result(self, key: "CaptureKey") -> "CaptureResult | None":
        """A list with the key's number of rows; returned once."""
        return self._results.pop(key, None)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Do nothing, as nothing is in flight."""


def plug_in(folder: Path) -> str:
    """The paths to add to PYTHONPATH so that engines find the consumer `host_memory`.

    Python treats a folder on its path with package metadata as an installed package.
    The checkout's own `vllm/` is not a package, so a later `vllm` on the path is used.
    """
    info = folder / "clearbox_benchmarks-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: clearbox-benchmarks\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.capture_consumers]\n"
        f"{NAME} = benchmarks.harness.host_memory:HostMemory\n"
    )
    return f"{folder.resolve()}:{ROOT}"
