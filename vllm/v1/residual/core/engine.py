# SPDX-License-Identifier: Apache-2.0
"""What the engine core calls of capture, readouts, steering and hooks.

An engine core has one such object, `EngineCore.residual`, and a method for each call
that front ends make by name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.capture.core import engine as capture
from vllm.v1.hooks.core import engine as hooks
from vllm.v1.readouts.core import engine as readouts
from vllm.v1.residual import changed_streams, nonfinite_streams
from vllm.v1.residual.core import block_keys
from vllm.v1.residual.core.messages import ModelFacts
from vllm.v1.residual.core.scheduler import has_features
from vllm.v1.steering.core import engine as steering
from vllm.v1.steering.core import name_log, refusals
from vllm.v1.steering.vector_cache import ReceivedVectors

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

Core = TypeVar("Core", bound=type)

CALLS: tuple[Callable[..., Any], ...] = (
    capture.end_captures,
    capture.introduce_capture,
    hooks.take_hook_results,
    hooks.prefetch_parameters,
    hooks.clear_parameters,
    readouts.load_readout_module,
    readouts.unload_readout_module,
    readouts.readout_status,
    readouts.decoded_rows,
    readouts.unembedding_rows,
    steering.dynamic_steering,
    steering.set_steering,
    steering.get_steering,
    steering.hold_steering,
    steering.commit_steering,
    steering.release_steering,
    name_log.module_names,
    name_log.change_module_name,
)
"""The methods that front ends call, whose first argument is the engine core."""


class NoCore:
    """The null object, used if no stream can be read or changed, and base class."""

    def mark(self, config: "VllmConfig", kv_cache: Sequence["KVCacheConfig"]) -> None:
        """Prepare the KV cache, before the scheduler and the workers know it."""

    def complete(self, request: "EngineCoreRequest") -> None:
        """Complete a request that has just arrived; on the thread that receives."""

    def refuses(self, core: "EngineCoreProc", request: "Request") -> bool:
        """Whether a request cannot be carried out; if so, it is answered here."""
        return False

    def explain(
        self, core: "EngineCore", outputs: "Mapping[int, EngineCoreOutputs]"
    ) -> None:
        """Complete the outputs of a step, before the next one is scheduled."""

    def users_of(self, core: "EngineCore", sae: str) -> str:
        """What uses an SAE now, as text; empty if nothing does."""
        return ""

    def accepts_when_stopping(self, call: str) -> bool:
        """Whether a front end may still make a call while the engine stops."""
        return False

    def close(self, core: "EngineCore") -> None:
        """Send the workers what they still wait for."""

    def note_adapter(self, core: "EngineCore", adapter: "LoRARequest") -> None:
        """Note that an adapter is loaded before the next step."""
        block_keys.note_adapter(core.scheduler, adapter.lora_name)

    def note_worker_call(self, core: "EngineCore", method: object) -> None:
        """Note that workers' methods are called, some of which change the weights.

        Raises:
            SteeringValidationError: it is a method of an earlier public fork.

        """
        refusals.refuse_worker_call(method)
        if method in block_keys.WEIGHT_CALLS:
            block_keys.note_weights(core.scheduler)

    def facts(self, config: "VllmConfig") -> ModelFacts:
        """What front ends must know of the loaded model."""
        return ModelFacts(
            config.capture_config.hook_points,
            config.capture_config.point_shapes,
            config.capture_config.staging,
            config.capture_config.missing,
            config.readout_config.refusals,
        )


class CoreFeatures(NoCore):
    """The engine core's parts of the features."""

    def __init__(self) -> None:
        self._received = ReceivedVectors()

    def mark(self, config: "VllmConfig", kv_cache: Sequence["KVCacheConfig"]) -> None:
        changed_streams.mark(config, kv_cache)

    def complete(self, request: "EngineCoreRequest") -> None:
        self._received.complete(request)

    def refuses(self, core: "EngineCoreProc", request: "Request") -> bool:
        return steering.refuses(core, request)

    def explain(
        self, core: "EngineCore", outputs: "Mapping[int, EngineCoreOutputs]"
    ) -> None:
        nonfinite_streams.explain(core, outputs)

    def users_of(self, core: "EngineCore", sae: str) -> str:
        return steering.uses_of(core, sae)

    def accepts_when_stopping(self, call: str) -> bool:
        # Requests that finish while the engine drains were captured.
        return call == capture.end_captures.__name__

    def close(self, core: "EngineCore") -> None:
        capture.deliver_ends(core)


NO_CORE = NoCore()


def open_core(core: "EngineCore") -> NoCore:
    """Create the object of an engine core whose model has just been loaded."""
    capture.note_model(core)
    return CoreFeatures() if has_features(core.vllm_config) else NO_CORE


def with_calls(core: Core) -> Core:
    """Add the calls of front ends to the class of the engine core.

    An object of the class that is made without its constructor has the null object.
    """
    core.residual = NO_CORE  # type: ignore[attr-defined]
    for call in CALLS:
        setattr(core, call.__name__, call)
    return core
