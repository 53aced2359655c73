# SPDX-License-Identifier: Apache-2.0
"""The consumer `logging`, which logs what was captured, to check that capture works."""

import logging
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from vllm.logger import init_logger
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.capture.selectors import parse_spec
from vllm.v1.capture.types import CaptureContext, CaptureKey, CaptureSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class LoggingConsumer(CaptureConsumer):
    """Logs one line per key: shape, dtype and mean norm of the rows.

    Parameters: `hooks` as `{hook: [layers]}`, and `positions`, which form the global
    spec (none by default), and `level`, the log level, such as `DEBUG`. A request can
    send a spec of its own under `logging`.
    """

    location: Literal["worker", "driver"] = "worker"
    reads_client_spec: ClassVar[bool] = True
    remembers_specs: ClassVar[bool] = False

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        self.check_params(params)
        self._level = getattr(logging, params.get("level", "INFO"))
        self._spec = (
            CaptureSpec(params["hooks"], params.get("positions", "last_prompt"))
            if "hooks" in params
            else None
        )

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> None:
        """As of `CaptureConsumer`."""
        known = ["hooks", "positions", "level"]
        Options("capture_consumers.logging", params, known).choice("level", LEVELS)

    def global_capture_spec(self) -> CaptureSpec | None:
        """The spec in the parameters."""
        return self._spec

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Parse `{"hooks": ..., "positions": ...}`."""
        return parse_spec(raw, ctx, f"capture.{self.instance_name or 'logging'}")

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> str:
        """Log the rows; the logged line is the result's payload."""
        norm = mean_norm(tensor)
        line = (
            f"{sidecar['client_request_id']} layer {key[1]} {key[2]}: "
            f"{tuple(tensor.shape)} {sidecar['dtype']}, mean norm {norm:.4g}"
        )
        logger.log(self._level, "captured %s", line)
        return line

    def on_error(self, key: CaptureKey, error: str) -> None:
        """Log the failure."""
        logger.error("capture of %s failed: %s", key, error)


def mean_norm(rows: torch.Tensor) -> float:
    """The mean L2 norm of rows, computed in float32; 0 if there are none."""
    return rows.float().norm(dim=-1).mean().item() if len(rows) else 0.0
