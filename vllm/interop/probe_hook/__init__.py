# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-probe-hook: hidden states of each generated token.

The package `vllm_probe_hook` is installed too, so that scripts run unchanged.
"""

from vllm.interop.probe_hook.llm import LLM, AsyncLLM
from vllm.interop.probe_hook.rows import ProbeOptions
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "ProbeOptions", "RequestOutput", "SamplingParams"]
