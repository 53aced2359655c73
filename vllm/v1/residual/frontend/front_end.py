# SPDX-License-Identifier: Apache-2.0
"""What an engine and its processors call of capture, steering and hooks.

An engine has one such object, `residual`, which its input processor and its output
processor share. It keeps no reference to the engine, whose memory would then be freed
later than upstream's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.capture.consumers.memory.api import kept_run
from vllm.v1.capture.frontend.disabled import NO_CAPTURE, NoCapture
from vllm.v1.capture.frontend.frontend import open_capture
from vllm.v1.capture.selectors import check_request_size
from vllm.v1.hooks.frontend.frontend import NO_HOOKS, NoHooks, open_hooks
from vllm.v1.readouts.engine_args import check_places
from vllm.v1.readouts.frontend.admission import ReadoutAdmission
from vllm.v1.readouts.frontend.admission import refuse as refuse_readouts
from vllm.v1.readouts.frontend.collector import Collector, collector_for
from vllm.v1.readouts.frontend.collector import ended_by as ended_by
from vllm.v1.residual import nonfinite_streams
from vllm.v1.residual.engine_call import outputs_ended as outputs_ended
from vllm.v1.residual.frontend.named_files import named_files
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
from vllm.v1.steering.receipts import Receipt
from vllm.v1.steering.spec.table import as_array

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.residual.core.messages import RequestResults


class NoResults:
    """The null object, `RequestState.residual` of most requests, and base class."""

    capture_id: str | None = None
    """Set if the request is captured."""
    hooks_key: str | None = None
    """Set if functions run for the request."""
    readouts: Collector | None = None
    """Set if the request has readouts."""
    receipt: Receipt | None = None
    """Set if the request asked for a receipt."""

    def collect(self, found: "RequestResults | None") -> None:
        """Add what came with an output of the engine core."""

    def complete(
        self, state: "RequestState", sample: "CompletionOutput", stop_reason: object
    ) -> None:
        """Attach the results to an output of a sample."""

    def name(self, output: Any) -> None:
        """Attach to an output by what its further results are found."""


NO_RESULTS = NoResults()


@dataclass
class Results(NoResults):
    """The results of one sample."""

    readouts: Collector | None
    receipt: Receipt | None
    hooks_key: str | None

    def collect(self, found: "RequestResults | None") -> None:
        if found is None:
            return
        if self.readouts is not None:
            for part in found.readouts or ():
                self.readouts.add(part)
        if self.receipt is not None and found.receipt:
            self.receipt.add(found.receipt)

    def complete(
        self, state: "RequestState", sample: "CompletionOutput", stop_reason: object
    ) -> None:
        assert state.detokenizer is not None, "a request with results generates text"
        num_tokens, finished = state.detokenizer.num_output_tokens(), sample.finished()
        # The last token is not fed to the model, unless a readout fired at it.
        fed = num_tokens if ended_by(stop_reason) else max(num_tokens - 1, 0)
        if self.readouts is not None:
            is_delta = state.output_kind == RequestOutputKind.DELTA
            sample.readouts = self.readouts.results(fed, is_delta, finished)
        if self.receipt is not None and finished:
            sample.steering = self.receipt.as_dict(state.prompt_len + fed)

    def name(self, output: Any) -> None:
        if isinstance(output, RequestOutput):
            output.capture_id, output.hooks_key = self.capture_id, self.hooks_key


def results_of(params: "SamplingParams | None", num_prompt: int) -> NoResults:
    """The object that collects the results of a request that is sent to the engine."""
    if params is None:
        return NO_RESULTS
    hooks_key = None if params._hooks is None else params._hooks.key
    steering = params._steering
    told = steering is not None and steering.receipt
    receipt = Receipt(num_prompt) if told else None
    if params._capture_plan is None and receipt is None and hooks_key is None:
        return NO_RESULTS
    changed = frozenset() if steering is None else steering.taps
    return Results(collector_for(params, changed), receipt, hooks_key)


def named(make: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the method that makes the outputs of a request."""

    def make_named(state: "RequestState", *args: Any, **kwargs: Any) -> Any:
        output = make(state, *args, **kwargs)
        state.residual.name(output)
        return output

    return make_named


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

    def note_step(self, outputs: Sequence[Any]) -> None:
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
    named = named_files(modules)
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
