# SPDX-License-Identifier: Apache-2.0
"""`vllm.interop.probe_hook`, under the import name of scripts for vllm-probe-hook."""

from vllm.interop.probe_hook import LLM, AsyncLLM, RequestOutput, SamplingParams

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams"]
