# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-probe-hook: hidden states beside each generated token.

Installed as the package `vllm_probe_hook` too, so that its scripts run unchanged.
"""

from vllm.interop.probe_hook.async_llm import AsyncLLM
from vllm.interop.probe_hook.llm import LLM
from vllm.interop.probe_hook.rows import ProbeOptions
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "ProbeOptions", "RequestOutput", "SamplingParams"]
