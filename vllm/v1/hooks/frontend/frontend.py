# SPDX-License-Identifier: Apache-2.0
"""Hook functions in the front end: admission of requests, and their results."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from msgspec.structs import replace

from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.hooks.errors import HookError, fail
from vllm.v1.hooks.frontend.parse import MOST_HOOKS, Allowed, parse_hooks
from vllm.v1.hooks.plan import HookPlan, HookSpec
from vllm.v1.hooks.results import Saved, merged_results
from vllm.v1.residual.engine_call import call_engine, call_engines

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

logger = init_logger(__name__)

FIELD = "apply_hooks"
"""Key of `extra_args` and `vllm_xargs`."""
WHERE = f"extra_args.{FIELD}"

MOST_RESULTS = 4096
"""Most requests whose results of registered hooks are kept; older ones are dropped."""

DISABLED = (
    "start the server with --vllm-lens-api (LLM(vllm_lens_api=True)), or use "
    "steering_vectors and readouts"
)


class NoHooks:
    """The null object for engines whose requests cannot have hook functions."""

    def admit(self, request_id: str, params: "SamplingParams") -> None:
        """Refuse a request with hook functions.

        Raises:
            HookError: the request has hook functions.

        """
        if params.extra_args and FIELD in params.extra_args:
            raise fail(f"{WHERE}: {DISABLED}", WHERE, "(hooks)")

    def complete(self, outputs: "Iterable[RequestOutput]") -> None:
        """Attach saved values to final outputs."""

    async def complete_async(self, output: "RequestOutput") -> None:
        """Attach saved values to a final output."""

    def check(self) -> None:
        """Raise the error of a function that has failed since the last call."""


NO_HOOKS = NoHooks()


class HookFrontend(NoHooks):
    """Admits hooks, and keeps those that are registered for all requests."""

    def __init__(self, vllm_config: "VllmConfig", core: Any, offline: bool) -> None:
        """Start without registered hooks.

        Args:
            vllm_config: the engine's configuration.
            core: the client of the engine core.
            offline: whether the caller of this process also runs the engine, so that
                its code is trusted.

        """
        config = vllm_config.capture_config.hook_points or {}
        points = {layer: tuple(names) for layer, names in config.items()}
        self._allowed = Allowed(
            points, offline or vllm_config.steering_config.remote_code
        )
        self._pickles = self._allowed.code
        self._refusal = _refusal(vllm_config)
        self._servers = vllm_config.parallel_config._api_process_count
        self.core = core
        self._shared: tuple[HookSpec, ...] = ()
        self._results: dict[str, Saved] = {}
        """Values that registered hooks saved, by the client's request id."""
        self._errors: list[str] = []

    def admit(self, request_id: str, params: "SamplingParams") -> None:
        """Replace a request's hooks by their plan, `params._hooks`.

        Args:
            request_id: the client's id of the request.
            params: the request's sampling parameters; changed in place.

        Raises:
            HookError: a hook is invalid or cannot be run; the message names the remedy.

        """
        args = params.extra_args or {}
        given = args.get(FIELD)
        own = () if given is None else parse_hooks(given, self._allowed, WHERE)
        if FIELD in args:
            rest = {name: value for name, value in args.items() if name != FIELD}
            params.extra_args = rest or None
        hooks = self._shared + own
        params._hooks = None
        if not hooks:
            return
        self._check(params, is_own=bool(own))
        key = f"{request_id}:{uuid4().hex}"
        params._hooks = HookPlan(key, hooks, self._pickles)
        # Only a preempted request has cached blocks, whose rows it would not see again.
        params.skip_reading_prefix_cache = True

    def _check(self, params: "SamplingParams", is_own: bool) -> None:
        if self._refusal:
            raise fail(f"{WHERE}: {self._refusal}", WHERE, "(hooks)")
        if params.n > 1:
            what = WHERE if is_own else "n: hooks are registered for all requests"
            raise fail(
                f"{what}; with n={params.n} each sample would have results of its "
                "own: send a request for each",
                "n",
                params.n,
            )

    def parse_shared(self, hooks: Any) -> tuple[HookSpec, ...]:
        """Parse hooks for all later requests.

        Raises:
            HookError: a hook is invalid, there would be more than `MOST_HOOKS`, or
                there are several API servers.

        """
        if self._servers > 1:
            raise fail(
                f"hooks: only one of the {self._servers} API server processes would "
                f"know them; send {FIELD} with each request",
                "hooks",
                self._servers,
            )
        if self._refusal:
            raise fail(f"hooks: {self._refusal}", "hooks", "(hooks)")
        added = parse_hooks(hooks, self._allowed, "hooks")
        self._check_count(added)
        return added

    def _check_count(self, added: Sequence[HookSpec]) -> None:
        if (count := len(self._shared) + len(added)) > MOST_HOOKS:
            raise fail(
                f"hooks: {count} would be registered, and at most {MOST_HOOKS} may be; "
                "clear_hooks (POST /v1/hooks/clear) removes them",
                "hooks",
                count,
            )

    def register(self, added: Sequence[HookSpec]) -> int:
        """Add parsed hooks for all later requests; returns their number.

        Raises:
            HookError: there would be more than `MOST_HOOKS`.

        """
        self._check_count(added)
        first = len(self._shared)
        self._shared += tuple(
            replace(one, key=str(first + number), shared=True)
            for number, one in enumerate(added)
        )
        return len(added)

    def clear(self) -> None:
        """Remove the registered hooks, and drop what they saved.

        Requests in flight keep them.
        """
        self._shared = ()
        self.clear_results()

    @property
    def results(self) -> Mapping[str, Saved]:
        """What registered hooks saved, by request; stays until it is cleared."""
        return dict(self._results)

    def clear_results(self) -> None:
        """Drop the values that registered hooks saved."""
        self._results.clear()

    def complete(self, outputs: "Iterable[RequestOutput]") -> None:
        """Attach saved values to final outputs."""
        for output in outputs:
            if getattr(output, "hooks_key", None) is None or not output.finished:
                continue
            parts = call_engine(self.core, "take_hook_results", output.hooks_key)
            if (error := self._attach(output, parts)) is not None:
                self._errors.append(error)

    async def complete_async(self, output: "RequestOutput") -> None:
        """Attach saved values to a final output.

        Raises:
            HookError: a function has failed.

        """
        results = await call_engines(self.core, "take_hook_results", output.hooks_key)
        parts = [part for engine in results for part in engine]
        if (error := self._attach(output, parts)) is not None:
            raise _failed(error)

    def check(self) -> None:
        """Raise the error of a function that has failed since the last call.

        Raises:
            HookError: the message names the function and its exception.

        """
        errors, self._errors = self._errors, []
        if errors:
            raise _failed(errors[0])

    def _attach(self, output: "RequestOutput", parts: list[bytes | None]) -> str | None:
        """Attach results; returns an error message, if a function has failed."""
        found = merged_results(parts, self._pickles)
        if found.errors:
            key, message = next(iter(found.errors.items()))
            return f"hook {key} of request {output.request_id}: {message}"
        output.hook_results = found.own or None
        if found.shared:
            self._results[output.request_id] = found.shared
            if len(self._results) > MOST_RESULTS:
                self._results.pop(next(iter(self._results)))
                logger.warning_once(
                    "Results of registered hooks are kept of %d requests; older ones "
                    "are dropped. Call clear_hook_results",
                    MOST_RESULTS,
                )
        return None


def _failed(message: str) -> HookError:
    return fail(
        f"{message}. The traceback is in the engine's log", FIELD, "(a hook raised)"
    )


def _refusal(vllm_config: "VllmConfig") -> str:
    """The reason why this engine cannot run functions; empty if it can."""
    graphs = vllm_config.compilation_config.cudagraph_mode not in (
        None,
        CUDAGraphMode.NONE,
    )
    engines = vllm_config.parallel_config.data_parallel_size
    if engines > 1 and graphs and vllm_config.model_config.is_moe:
        return (
            "with data-parallel engines that share experts a step cannot be run "
            "without CUDA graphs on one of them; start the server with "
            "--data-parallel-size 1, or --enforce-eager"
        )
    if vllm_config.speculative_config is not None:
        return (
            "with speculative decoding functions would see drafts that are rejected; "
            "start the server without it"
        )
    on_gpu = current_platform.is_cuda_alike()
    if on_gpu and graphs and not vllm_config.use_v2_model_runner:
        return (
            "the V1 model runner cannot run single steps without CUDA graphs; start "
            "the server with --enforce-eager, or VLLM_USE_V2_MODEL_RUNNER=1"
        )
    return ""


def open_hooks(engine: "LLMEngine | AsyncLLM", offline: bool) -> NoHooks:
    """Create the front end of an engine.

    Args:
        engine: the engine.
        offline: whether it runs its caller's functions. The clients of a serving engine
            are not trusted.

    """
    if not engine.vllm_config.steering_config.hooks:
        return NO_HOOKS
    return HookFrontend(engine.vllm_config, engine.engine_core, offline)
