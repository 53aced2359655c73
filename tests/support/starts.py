# SPDX-License-Identifier: Apache-2.0
"""Leaves out of engines' starts what takes seconds and no test is about."""

import gc
import sys
from functools import cache
from typing import Any

import pytest


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Change upstream, as far as it is imported. The heap is frozen until it is undone.

    Later calls of `gc.freeze` and `gc.unfreeze` do nothing: upstream collects garbage
    in the whole heap five times for each engine, and thaws the heap when it stops, so
    also what was here before.
    """
    gc.collect()
    gc.freeze()
    patch.setattr(gc, "freeze", lambda: None)
    patch.setattr(gc, "unfreeze", lambda: None)
    if platform := sys.modules.get("vllm.platforms.cpu"):
        # It writes zeros to the whole KV cache, which has a gigabyte at least.
        patch.setattr(platform, "GiB_bytes", 1 << 28)
        # It compares every name of every module with its kernels, for each worker.
        register = cache(platform.CpuPlatform.register_triton_kernel_overrides)
        name = "register_triton_kernel_overrides"
        patch.setattr(platform.CpuPlatform, name, staticmethod(register))
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        # It inspects each class of models in a new process.
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
    if clients := sys.modules.get("vllm.v1.engine.core_client"):
        begin = clients.InprocClient.__init__

        def begin_alone(*arguments: Any, **options: Any) -> None:
            # The finalizer of an engine that nobody stopped would end the groups of
            # this one.
            gc.collect()
            begin(*arguments, **options)

        patch.setattr(clients.InprocClient, "__init__", begin_alone)
