# SPDX-License-Identifier: Apache-2.0
"""The consumer that keeps rows in memory, under names, to be read later."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.consumers.inline import most_bytes
from vllm.v1.capture.consumers.memory.store import RowStore
from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import CaptureContext, CaptureKey, CaptureSpec
from vllm.v1.residual.plain_data import plain
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}")
"""Not `.` nor `..`, which clients remove from the path of a URL."""


class MemoryConsumer(CaptureConsumer):
    """Keeps rows in the process of the `LLM` or API server until they are dropped.

    A request's spec is `{"hooks": ..., "positions": ..., "name": "train"?}`. Requests
    with the same name are kept together; without a name, a request is kept under its
    own id. Rows are read with `LLM.captured`, `AsyncLLM.captured` or
    `GET /v1/capture/memory/NAME` any number of times, and dropped with
    `LLM.drop_captured` or `DELETE`. A request that can have more rows than fit is
    refused.
    """

    location: Literal["worker", "driver"] = "driver"
    reads_client_spec: ClassVar[bool] = True
    remembers_specs: ClassVar[bool] = False
    kind: ClassVar[str] = "memory"
    name_key: ClassVar[str] = "name"
    """The key of a spec that has the name."""
    evicts: ClassVar[bool] = False
    """Whether names that were not used for long make room for new ones."""

    def __init__(
        self, vllm_config: "VllmConfig | None", params: dict[str, Any]
    ) -> None:
        self.check_params(params)
        host_bytes = BUDGET.limit
        if vllm_config is not None:
            host_bytes = vllm_config.capture_config.host_memory_bytes
            servers = vllm_config.parallel_config._api_process_count
            if servers > 1:
                raise CaptureValidationError(
                    f"capture_consumers.{self.kind}: with {servers} API servers each "
                    "would keep the rows of its own requests only; start one "
                    "(--api-server-count 1), or use the filesystem consumer",
                    parameter=f"capture_consumers.{self.kind}",
                    value=servers,
                )
        most = params.get("max_bytes", max(host_bytes // 2, 1))
        self.store = RowStore(most, self.evicts)

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> None:
        """As of `CaptureConsumer`."""
        where = f"capture_consumers.{cls.kind}"
        Options(where, params, ["max_bytes"]).whole("max_bytes")

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Check the spec and the name, and that there is room for the rows."""
        instance = self.instance_name or self.kind
        where = f"capture.{instance}"
        raw = plain(raw)
        spec = parse_spec(raw, ctx, where, (self.name_key,))
        if spec.heads:
            raise fail(
                f"{where}.heads: kept rows are whole, because a patch may take any "
                "head of them; leave it out, and read the columns of the heads",
                f"{where}.heads",
                raw["heads"],
            )
        name = raw.get(self.name_key)
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise fail(
                f"{where}.{self.name_key} must be 1 to 128 letters, digits, dots, "
                "dashes or underscores, and neither '.' nor '..'",
                f"{where}.{self.name_key}",
                name,
            )
        size, what = most_bytes(spec, ctx, where)
        if size > (room := self.store.room):
            raise fail(
                f"{where}: {what}, may take {size} bytes; {room} of "
                f"{self.store.max_bytes} (max_bytes) are free. Drop names that are no "
                "longer needed, capture less, or start with --capture-consumers "
                f"{instance}:max_bytes=BYTES",
                where,
                size,
            )
        return spec

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> dict[str, str] | None:
        """Keep the rows of a key; the payload is `{"name": ...}`, where they are.

        None if the request's `keep_when` did not fire.
        """
        return self.on_group([key[1:]], tensor.unsqueeze(0), sidecar)

    def on_group(
        self, taps: Sequence[Tap], rows: torch.Tensor, sidecar: dict[str, Any]
    ) -> dict[str, str] | None:
        """Keep the rows `[taps, rows, hidden_size]` of a group of taps."""
        spec = sidecar.get("client_spec") or {}
        name = spec.get(self.name_key) or path_safe(sidecar["client_request_id"])
        if sidecar.get("fired") is False:
            self.store.note_unkept(name)
            return None
        rows = rows.to(getattr(torch, sidecar["dtype"]))
        self.store.put(name, taps, rows, sidecar)
        return {"name": name}


def path_safe(request_id: str) -> str:
    """A request id as a name; characters that a name cannot contain become `_`."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", request_id)[:128]
    return name if _NAME.fullmatch(name) else f"_{name}"
