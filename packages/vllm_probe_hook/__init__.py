# SPDX-License-Identifier: Apache-2.0
"""`vllm.interop.probe_hook`, under the import name of scripts for vllm-probe-hook.

Every other public name is that of `vllm`.
"""

from typing import Any

import vllm
from vllm.interop.probe_hook import LLM as LLM
from vllm.interop.probe_hook import AsyncLLM as AsyncLLM
from vllm.interop.probe_hook import RequestOutput as RequestOutput
from vllm.interop.probe_hook import SamplingParams as SamplingParams

__all__ = ["AsyncLLM", *vllm.__all__]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in vllm.__all__:
        return getattr(vllm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
