# SPDX-License-Identifier: Apache-2.0
"""Methods that hook functions add to `LLM` and `AsyncLLM`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.hooks.errors import fail
from vllm.v1.hooks.frontend.frontend import DISABLED, HookFrontend
from vllm.v1.hooks.results import Saved
from vllm.v1.residual.bounds import shown
from vllm.v1.residual.engine_call import call_engine

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM


def register_hooks(
    self: "LLM", hooks: Any, prefetch_params: Sequence[str] | None = None
) -> int:
    """Run functions for all later requests.

    Args:
        self: the engine that runs them.
        hooks: a list of `Hook`s; they are added to those registered before.
        prefetch_params: names of parameters to keep whole in every worker.

    Returns:
        The number of added hooks.

    Raises:
        HookError: a hook or a name is invalid; nothing has changed.

    """
    frontend = _frontend(self.llm_engine)
    added = frontend.parse_shared(hooks)
    if prefetch_params:
        self.prefetch_params(prefetch_params)
    return frontend.register(added)


def collect_hook_results(self: "LLM") -> dict[str, Saved]:
    """The values that registered functions saved, by request and hook.

    `{request id: {hook's number: saved}}`, for finished requests. They stay until
    `clear_hook_results` or `clear_hooks`.
    """
    return dict(_frontend(self.llm_engine).results)


def clear_hooks(self: "LLM") -> None:
    """Remove the registered functions, and drop what they saved."""
    _frontend(self.llm_engine).clear()


def clear_hook_results(self: "LLM") -> None:
    """Drop the values that registered functions saved."""
    _frontend(self.llm_engine).clear_results()


def prefetch_params(self: "LLM", names: Sequence[str]) -> list[str]:
    """Keep whole parameters in every worker, for `ctx.get_parameter`.

    Needed for parameters of another pipeline stage than the hook's.

    Returns:
        The names.

    Raises:
        HookError: the model has no parameter with one of the names.

    """
    frontend = _frontend(self.llm_engine)
    wanted = _names(names)
    return _found(wanted, call_engine(frontend.core, "prefetch_parameters", wanted))


def clear_prefetched(self: "LLM") -> None:
    """Drop prefetched parameters."""
    call_engine(_frontend(self.llm_engine).core, "clear_parameters")


async def async_register_hooks(
    self: "AsyncLLM", hooks: Any, prefetch_params: Sequence[str] | None = None
) -> int:
    """Run functions for all later requests; see `LLM.register_hooks`."""
    frontend = _frontend(self)
    added = frontend.parse_shared(hooks)
    if prefetch_params:
        await async_prefetch_params(self, prefetch_params)
    return frontend.register(added)


async def async_collect_hook_results(self: "AsyncLLM") -> dict[str, Saved]:
    """Return what `LLM.collect_hook_results` returns."""
    return dict(_frontend(self).results)


async def async_clear_hooks(self: "AsyncLLM") -> None:
    """Remove the registered functions, and drop what they saved."""
    _frontend(self).clear()


async def async_clear_hook_results(self: "AsyncLLM") -> None:
    """Drop the values that registered functions saved."""
    _frontend(self).clear_results()


async def async_prefetch_params(self: "AsyncLLM", names: Sequence[str]) -> list[str]:
    """Keep whole parameters in every worker; see `LLM.prefetch_params`."""
    core, wanted = _frontend(self).core, _names(names)
    return _found(wanted, await core.call_utility_async("prefetch_parameters", wanted))


async def async_clear_prefetched(self: "AsyncLLM") -> None:
    """Drop prefetched parameters."""
    await _frontend(self).core.call_utility_async("clear_parameters")


def _frontend(engine: Any) -> HookFrontend:
    frontend = engine.hooks
    if not isinstance(frontend, HookFrontend):
        raise fail(f"hooks: {DISABLED}", "hooks", "(hooks)")
    return frontend


def _names(raw: Any) -> list[str]:
    names = [raw] if isinstance(raw, str) else raw
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and name for name in names
    ):
        raise fail("params must be a list of names of parameters", "params", raw)
    return list(dict.fromkeys(names))


def _found(names: list[str], missing: list[str]) -> list[str]:
    if missing:
        raise fail(
            f"params: the model has no parameter {shown(missing[0])}; fused weights "
            "have vLLM's names, such as model.layers.0.self_attn.qkv_proj.weight",
            "params",
            missing[0],
        )
    return names
