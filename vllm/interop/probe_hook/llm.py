# SPDX-License-Identifier: Apache-2.0
"""An `LLM` and an asynchronous engine whose outputs have hidden states."""

from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.llm import LLM as EngineLLM
from vllm.interop.probe_hook.rows import (
    CONSUMERS,
    OPTIONS,
    ROWS_DTYPE,
    Layers,
    ProbeOptions,
    attach,
    with_capture,
)
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM as EngineAsyncLLM

Params = SamplingParams | Sequence[SamplingParams] | None


def _split(
    layers: Layers, given: dict[str, Any]
) -> tuple[ProbeOptions, dict[str, Any]]:
    """A constructor's arguments: the probe's, and those of the engine.

    The engine gets the consumers of the rows, and the rows' dtype for its model.
    """
    engine = {"model_dtype": given.get("dtype", ROWS_DTYPE), **given}
    own = {name: engine.pop(name) for name in OPTIONS if name in engine}
    engine["dtype"] = engine.pop("model_dtype")
    engine["capture_consumers"] = [*given.get("capture_consumers", ()), *CONSUMERS]
    return ProbeOptions(layers=layers, **own), engine


class LLM(EngineLLM):
    """vLLM's `LLM`; each output has `hidden_states` and `prefill_hidden_states`."""

    def __init__(self, model: str, layers: Layers = "all", **options: Any) -> None:
        """Start the engine.

        Args:
            model: name or path, as vLLM takes it.
            layers: see `ProbeOptions`.
            options: the other fields of `ProbeOptions`, and any other argument of
                vLLM's `LLM`. `dtype` is that of the rows and, unless `model_dtype` is
                given, of the model.

        Raises:
            CaptureValidationError: an option is invalid; the message names it and the
                remedy.

        """
        probe, engine = _split(layers, options)
        super().__init__(model, **engine)
        self.probe = probe.of_model(self.llm_engine.vllm_config)

    def generate(
        self, prompts: Any, sampling_params: Params = None, **more: Any
    ) -> list[RequestOutput]:
        """Generate as vLLM's `LLM` does, with hidden states on each output."""
        outputs = super().generate(prompts, self._capturing(sampling_params), **more)
        return [attach(output, self.probe) for output in outputs]

    def chat(  # type: ignore[override]  # the rest is passed on by name
        self, messages: Any, sampling_params: Params = None, **more: Any
    ) -> list[RequestOutput]:
        """Chat as vLLM's `LLM` does, with hidden states on each output."""
        outputs = super().chat(messages, self._capturing(sampling_params), **more)
        return [attach(output, self.probe) for output in outputs]

    def _capturing(self, params: Params) -> SamplingParams | list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return with_capture(params, self.probe)
        return [with_capture(one, self.probe) for one in params]


class AsyncLLM:
    """vLLM's `AsyncLLM`; other attributes and methods are those of the engine."""

    def __init__(self, model: str, layers: Layers = "all", **options: Any) -> None:
        """Start the engine; the arguments are those of `LLM`."""
        probe, engine = _split(layers, options)
        args = AsyncEngineArgs(model=model, **engine)
        self.engine = EngineAsyncLLM.from_engine_args(args)
        self.probe = probe.of_model(self.engine.vllm_config)

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None = None,
        **more: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs with the hidden states that are available so far.

        The last output has all of them.
        """
        capturing = with_capture(params, self.probe)
        name = request_id or uuid4().hex
        async for output in self.engine.generate(prompt, capturing, name, **more):
            yield attach(output, self.probe)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
