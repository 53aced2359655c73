# SPDX-License-Identifier: Apache-2.0
"""An asynchronous engine whose outputs have hidden states."""

from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

import torch

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.interop.probe_hook.rows import CONSUMERS, ProbeOptions, attach, with_capture
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM as EngineAsyncLLM


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
        vllm["dtype"] = vllm.pop("model_dtype", dtype)
        vllm["capture_consumers"] = [*vllm.get("capture_consumers", ()), *CONSUMERS]
        args = AsyncEngineArgs(model=model, **vllm)
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
