# SPDX-License-Identifier: Apache-2.0
"""The base class of consumers that run within each step, on the engine's thread."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vllm.v1.capture.step_view import StepCaptureView
from vllm.v1.capture.types import CaptureSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SyncCaptureConsumer(ABC):
    """Gets the rows of a step on the device, and may answer with actions.

    The operator names it in `capture_consumers`. It slows every step by what `on_step`
    takes. With tensor parallelism the first rank has it, and all carry out its actions.
    With pipeline parallelism each stage has it, and that of its layers calls `on_step`.
    """

    location: ClassVar[Literal["worker", "driver"]] = "worker"
    execution: ClassVar[str] = "sync"
    reads_client_spec: ClassVar[bool] = False
    instance_name: str = ""
    """Set by the framework, from the configuration."""

    def __init__(self, vllm_config: "VllmConfig", params: dict[str, Any]) -> None:
        """Called once in the front end and once in the first worker of each stage."""
        self.vllm_config = vllm_config
        self.params = params

    @classmethod
    def declared_graphsafe_keys(cls, params: dict[str, Any]) -> list[str]:
        """Accepted for compatibility: every key is graph-safe."""
        return []

    @abstractmethod
    def global_capture_spec(self) -> CaptureSpec:
        """The rows that it sees, of every request."""

    @abstractmethod
    def on_step(self, view: StepCaptureView) -> Sequence[Any] | None:
        """Look at a step; called after its forward pass was queued on the device.

        Returns:
            Actions of `vllm.v1.worker.steering_action_queue`, which hold from the next
            step on.

        """

    def warmup(self, device: Any, dtype: Any) -> None:  # noqa: B027
        """Called once in the worker, before the first step."""

    def status(self) -> dict[str, Any]:
        """What `GET /v1/steering/dynamic` tells of it."""
        return {}

    def shutdown(self, timeout: float = 30.0) -> None:  # noqa: B027
        """Called when the engine stops."""
