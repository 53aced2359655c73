# SPDX-License-Identifier: Apache-2.0
"""What an engine and its processors call of capture, steering and hooks.

An engine has one such object, `residual`, which its input processor and its output
processor share. It keeps no reference to the engine, whose memory would then be freed
later than upstream's.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.capture.consumers.memory.api import kept_run
from vllm.v1.capture.frontend.disabled import NO_CAPTURE, NoCapture
from vllm.v1.capture.frontend.frontend import open_capture
from vllm.v1.capture.selectors import check_request_size
from vllm.v1.hooks.frontend.frontend import NO_HOOKS, NoHooks, open_hooks
from vllm.v1.readouts.engine_args import check_places
from vllm.v1.readouts.frontend.admission import ReadoutAdmission
from vllm.v1.readouts.frontend.admission import refuse as refuse_readouts
from vllm.v1.residual import nonfinite_streams
from vllm.v1.residual.engine_call import log_end as log_end
from vllm.v1.residual.frontend.named_files import named_files
from vllm.v1.residual.frontend.results import results_of
from vllm.v1.residual.module_info import KnownModules, ModuleInfo
from vllm.v1.steering.core.refusals import refusal_in
from vllm.v1.steering.frontend import async_frontend
from vllm.v1.steering.frontend.admission import request_fields
from vllm.v1.steering.frontend.dp_engines import Engines
from vllm.v1.steering.frontend.frontend import (
    NO_STEERING_FRONTEND,
    NoSteering,
    SteeringControl,
)
from vllm.v1.steering.frontend.name_sync import FollowedNames
from vllm.v1.steering.spec.arrays import as_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.loggers import StatLoggerManager


class FrontEnd:
    """The front ends of the features; each is a null object where a feature is off."""

    def __init__(
        self,
        capture: NoCapture = NO_CAPTURE,
        hooks: NoHooks = NO_HOOKS,
        control: Any = None,
        readouts: ReadoutAdmission | None = None,
        modules: KnownModules | None = None,
    ) -> None:
        """Join front ends.

        Args:
            capture: admits captures and readouts, and delivers their results.
            hooks: admits functions, and takes what they saved.
            control: changes global vectors, `SteeringControl` or its asynchronous
                counterpart; None before the engine has started.
            readouts: plans readouts, if rows are captured or read out.
            modules: the probes, translators and SAEs, if anything may name them.

        """
        self.readouts = readouts
        self.modules = modules
        self.capture = capture
        self.hooks = hooks
        self.control = control
        self.followed: FollowedNames | None = None
        """Set if other API server processes register probes and SAEs too."""
        self.steering: NoSteering = NO_STEERING_FRONTEND
        if control is not None:
            self.steering = control.frontend

    async def prepare(self, params: Any) -> Any:
        """Bound a request's parameters before they are copied, and parse large ones.

        Raises:
            VLLMValidationError: they are too large, or invalid.

        """
        check_request_size(params)
        if self.followed is not None and isinstance(params, SamplingParams):
            given = [getattr(params, name) for name in ("readouts", *request_fields())]
            if any(one is not None for one in given):
                await self.followed.refresh()
        if isinstance(self.control, async_frontend.AsyncSteeringControl):
            return await self.control.prepare(params)
        return params

    def admit(
        self,
        request_id: str,
        params: "SamplingParams",
        num_prompt: int,
        resumable: bool = False,
    ) -> None:
        """Check a request's fields and replace them by plans and vectors.

        Args:
            request_id: the client's id of the request.
            params: its parameters, changed in place; `max_tokens` is final.
            num_prompt: number of prompt tokens.
            resumable: whether more of the prompt may follow.

        Raises:
            VLLMValidationError: it is refused; the message names the remedy.

        """
        self.steering.admit(params, num_prompt, resumable)
        if self.readouts is None:
            refuse_readouts(params)
        # Last, as it reserves names for admitted requests.
        self.capture.admit(request_id, params, num_prompt, resumable)

    def add_request(self, state: "RequestState", request: "EngineCoreRequest") -> None:
        """Track a sample that is about to be sent to the engine."""
        params = request.sampling_params
        state.residual = results_of(params, state.prompt_len)
        if params is not None:
            self.capture.add_request(state, params)

    def end_request(self, state: "RequestState", finish_reason: object) -> None:
        """Note the end of a sample for its client: a stop, its length or an abort."""
        self.capture.end_request(state, str(finish_reason))

    def flush(self) -> None:
        """Send the noted ends, after a batch of outputs was processed."""
        self.capture.flush()

    def note_step(self, outputs: "Sequence[Any]") -> None:
        """Attach results to the final outputs of a step of an offline engine."""
        self.capture.note_results(outputs)
        self.hooks.complete(outputs)

    def concerns(self, output: "RequestOutput") -> bool:
        """Whether `complete` has to see an output of a serving engine."""
        if output.capture_id is not None or output.hooks_key is not None:
            return True
        return any([sample.finish_reason == "error" for sample in output.outputs])

    async def complete(
        self, engine: "AsyncLLM", request_id: str, output: "RequestOutput", params: Any
    ) -> None:
        """Attach results to an output, for which its request may wait.

        Args:
            engine: the engine of this front end.
            request_id: the engine's internal id of the request.
            output: an output that `concerns` has found.
            params: the parameters that the client has sent.

        Raises:
            VLLMValidationError: the output reports that the request was refused.
            HookError: a function has failed.
            GracefulHTTPError: the request was ended by an error of the server.

        """
        if any([sample.finish_reason == "error" for sample in output.outputs]):
            await self._raise_error(engine, request_id, output, params)
        if output.capture_id is not None:
            await self.capture.complete(output, params)
        if output.hooks_key is not None and output.finished:
            await self.hooks.complete_async(output)

    async def _raise_error(
        self, engine: "AsyncLLM", request_id: str, output: "RequestOutput", params: Any
    ) -> None:
        given = [name for name in request_fields() if getattr(params, name) is not None]
        error: Exception | None = refusal_in(output, *given[:1] or ["steering_vectors"])
        error = error or nonfinite_streams.error_in(output, *given[:1] or ["prompt"])
        if error is not None:
            # Other samples may be in flight.
            await engine.abort(request_id, internal=True)
            self.capture.refused(output)
            raise error

    def publish(self, manager: "StatLoggerManager | None") -> None:
        """Export the metrics, if the engine does."""
        self.capture.publish(manager)

    def settle(self, core: Any) -> None:
        """Wait for what the engine core must receive before it stops.

        Args:
            core: its client, if there is one; it is told that it stops.

        """
        self.capture.settle()
        if core is not None:
            core.stopping = True

    def close(self) -> None:
        """Stop receiving: the engine has stopped."""
        self.capture.close()


NO_FRONT_END = FrontEnd()


def open_front_end(engine: "LLMEngine | AsyncLLM", offline: bool = False) -> FrontEnd:
    """Open the front end of an engine, whose core has started, for its processors.

    Args:
        engine: the engine.
        offline: whether it is an `LLMEngine`; an `AsyncLLM` serves.

    """
    config = engine.vllm_config
    may_name = config.capture_config.enabled or config.steering_config.enabled
    if may_name:
        check_places(config)
    modules = KnownModules(config.readout_config.described)
    readouts = ReadoutAdmission(config, modules, as_array)
    named = named_files(lambda: modules)
    capture = open_capture(engine, readouts, offline)
    control: Any = SteeringControl if offline else async_frontend.open_control
    opened = FrontEnd(
        capture,
        open_hooks(engine, offline),
        control(engine, named, partial(kept_run, capture)),
        readouts if config.capture_config.enabled else None,
        modules if may_name else None,
    )
    if not offline and config.parallel_config._api_process_count > 1:
        ask = Engines(engine.engine_core).owner
        opened.followed = FollowedNames("readout", ModuleInfo, modules.put, ask)
    engine.input_processor.residual = engine.output_processor.residual = opened
    opened.publish(engine.logger_manager)
    return opened
