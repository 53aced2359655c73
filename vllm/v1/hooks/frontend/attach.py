# SPDX-License-Identifier: Apache-2.0
"""Creates the front end of hook functions for upstream's engines."""

from typing import TYPE_CHECKING

from vllm.v1.hooks.frontend.frontend import NO_HOOKS, HookFrontend, NoHooks

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine


def open_for_engine(engine: "LLMEngine") -> NoHooks:
    """Create the front end of an offline engine, which runs its caller's functions."""
    return _open(engine, offline=True)


def open_for_async_engine(engine: "AsyncLLM") -> NoHooks:
    """Create the front end of a serving engine, whose clients are not trusted."""
    return _open(engine, offline=False)


def _open(engine: "LLMEngine | AsyncLLM", offline: bool) -> NoHooks:
    if not engine.vllm_config.steering_config.hooks:
        return NO_HOOKS
    return HookFrontend(engine.vllm_config, engine.engine_core, offline)
