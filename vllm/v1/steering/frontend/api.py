# SPDX-License-Identifier: Apache-2.0
"""The methods that steering adds to `LLM` and `AsyncLLM`."""

from typing import TYPE_CHECKING, Any

from vllm.v1.steering.frontend.frontend import Clamps

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM


def set_steering(
    self: "LLM",
    vectors: Any = None,
    prefill_vectors: Any = None,
    decode_vectors: Any = None,
    *,
    clamps: Any = None,
    prefill_clamps: Any = None,
    decode_clamps: Any = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Set vectors that steer every request, on top of its own.

    The change holds from the next step on, for requests that are under way too, on
    every rank or on none.

    Args:
        self: the engine.
        vectors: for all tokens, `{hook: {layer: vector}}`.
        prefill_vectors: for prompt tokens, on top.
        decode_vectors: for generated tokens, on top.
        clamps: for all tokens, `{hook: {layer: [{"vector", "min"?, "max"?}, ...]}}`.
        prefill_clamps: for prompt tokens, on top.
        decode_clamps: for generated tokens, on top.
        replace: drop what was set before. Otherwise the vectors that are given
            replace those at the same hook points.

    Returns:
        What is set now, as `get_steering` tells it.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    control = self.llm_engine.steering
    return control.set(
        vectors,
        prefill_vectors,
        decode_vectors,
        replace,
        Clamps(clamps, prefill_clamps, decode_clamps),
    )


def clear_steering(self: "LLM") -> dict[str, Any]:
    """Remove the global vectors; requests keep their own."""
    return self.llm_engine.steering.clear()


def get_steering(self: "LLM") -> dict[str, Any]:
    """The global vectors as `{tier: {hook: {layer: {"norm": n}}}}`, and slots in use.

    Norms are those of the scaled vectors.
    """
    return self.llm_engine.steering.get()


async def async_set_steering(
    self: "AsyncLLM",
    vectors: Any = None,
    prefill_vectors: Any = None,
    decode_vectors: Any = None,
    *,
    clamps: Any = None,
    prefill_clamps: Any = None,
    decode_clamps: Any = None,
    replace: bool = False,
) -> dict[str, Any]:
    """As `LLM.set_steering`."""
    control = self.steering
    return await control.set(
        vectors,
        prefill_vectors,
        decode_vectors,
        replace,
        Clamps(clamps, prefill_clamps, decode_clamps),
    )


async def async_clear_steering(self: "AsyncLLM") -> dict[str, Any]:
    """As `LLM.clear_steering`."""
    return await self.steering.clear()


async def async_get_steering(self: "AsyncLLM") -> dict[str, Any]:
    """As `LLM.get_steering`."""
    return await self.steering.get()
