# SPDX-License-Identifier: Apache-2.0
"""Methods that steering adds to `LLM` and `AsyncLLM`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM


def set_steering(
    self: "LLM",
    vectors: Any = None,
    prefill_vectors: Any = None,
    decode_vectors: Any = None,
    *,
    replace: bool = False,
    **other: Any,
) -> dict[str, Any]:
    """Set the global vectors, which steer every request in addition to its own.

    The change takes effect from the next step on, for requests in flight too, on every
    rank or on none.

    Args:
        self: the engine to steer.
        vectors: vectors for all tokens, `{hook: {layer: vector}}`; a vector has
            `hidden_size` finite numbers (list, NumPy array or tensor, used as float32)
            or is an object with more keys, see `docs/steering/semantics.md`.
        prefill_vectors: vectors added for prompt tokens only.
        decode_vectors: vectors added for generated tokens only.
        replace: whether everything set before is dropped. Otherwise only what was set
            at the same hook points is replaced.
        other: fields of other systems' forms, such as `clamps`.

    Returns:
        The global vectors now in force, in the form of `get_steering`.

    Raises:
        SteeringValidationError: a value is invalid, or the sum with a request in flight
            overflows the model's dtype.

        SteeringChangeError: a rank failed to apply the change; nothing has changed.

    """
    raw = _by_field(vectors, prefill_vectors, decode_vectors, other)
    return self.llm_engine.steering.set(raw, replace)


def clear_steering(self: "LLM") -> dict[str, Any]:
    """Remove the global vectors; requests keep their own."""
    return self.llm_engine.steering.clear()


def get_steering(self: "LLM") -> dict[str, Any]:
    """The norms of the global vectors, by tier, hook point and layer, and slots in use.

    `{tier: {hook: {layer: {"norm": n}}}}`; norms are Euclidean, of the scaled vectors.
    """
    return self.llm_engine.steering.get()


async def async_set_steering(
    self: "AsyncLLM",
    vectors: Any = None,
    prefill_vectors: Any = None,
    decode_vectors: Any = None,
    *,
    replace: bool = False,
    **other: Any,
) -> dict[str, Any]:
    """Set the global vectors; arguments, result and errors are those of `LLM`."""
    raw = _by_field(vectors, prefill_vectors, decode_vectors, other)
    return await self.steering.set(raw, replace)


def _by_field(
    vectors: Any, prefill: Any, decode: Any, other: dict[str, Any]
) -> dict[str, Any]:
    own = {"vectors": vectors, "prefill_vectors": prefill, "decode_vectors": decode}
    return {**own, **other}


async def async_clear_steering(self: "AsyncLLM") -> dict[str, Any]:
    """Remove the global vectors; requests keep their own."""
    return await self.steering.clear()


async def async_get_steering(self: "AsyncLLM") -> dict[str, Any]:
    """Return what `LLM.get_steering` returns."""
    return await self.steering.get()
