# SPDX-License-Identifier: Apache-2.0
"""An `LLM` and an asynchronous engine whose outputs have hidden states."""

from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

import torch

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.llm import LLM as EngineLLM
from vllm.interop.probe_hook.rows import CONSUMERS, ProbeOptions, attach, with_capture
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM as EngineAsyncLLM

Params = SamplingParams | Sequence[SamplingParams] | None


def _arguments(given: dict[str, Any], dtype: str | torch.dtype) -> dict[str, Any]:
    """The engine's arguments, with the consumers of the rows and the model's dtype."""
    consumers = [*given.get("capture_consumers", ()), *CONSUMERS]
    others = {name: one for name, one in given.items() if name != "model_dtype"}
    model_dtype = given.get("model_dtype", dtype)
    return {**others, "dtype": model_dtype, "capture_consumers": consumers}


class LLM(EngineLLM):
    """vLLM's `LLM`; each output has `hidden_states` and `prefill_hidden_states`."""

    def __init__(
        self,
        model: str,
        layers: Sequence[int] | int | str = "all",
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        dtype: str | torch.dtype = "bfloat16",
        **vllm: Any,
    ) -> None:
        """Start the engine.

        Args:
            model: name or path, as vLLM takes it.
            layers: see `ProbeOptions`; so for the following five arguments.
            include_prefill: see `ProbeOptions`.
            include_decode: see `ProbeOptions`.
            last_prefill_token: see `ProbeOptions`.
            last_decode_token: see `ProbeOptions`.
            dtype: dtype of the rows and, unless `model_dtype` is given, of the model.
            vllm: any other argument of vLLM's `LLM`.

        Raises:
            CaptureValidationError: an option is invalid; the message names it and the
                remedy.

        """
        self.probe = ProbeOptions(
            layers=layers,
            include_prefill=include_prefill,
            include_decode=include_decode,
            last_prefill_token=last_prefill_token,
            last_decode_token=last_decode_token,
            dtype=dtype,
        )
        super().__init__(model, **_arguments(vllm, dtype))
        self.probe = self.probe.of_model(self.llm_engine.vllm_config)

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

    def __init__(
        self,
        model: str,
        layers: Sequence[int] | int | str = "all",
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        dtype: str | torch.dtype = "bfloat16",
        **vllm: Any,
    ) -> None:
        """Start the engine; the arguments are those of `LLM`."""
        self.probe = ProbeOptions(
            layers=layers,
            include_prefill=include_prefill,
            include_decode=include_decode,
            last_prefill_token=last_prefill_token,
            last_decode_token=last_decode_token,
            dtype=dtype,
        )
        args = AsyncEngineArgs(model=model, **_arguments(vllm, dtype))
        self.engine = EngineAsyncLLM.from_engine_args(args)
        self.probe = self.probe.of_model(self.engine.vllm_config)

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
