# SPDX-License-Identifier: Apache-2.0
"""Prefix caching: what the hash of a block names beside its tokens.

A block's keys and values depend on the weights that compute them. Upstream's hash names
an adapter and its path, but not which of several loads of it, and nothing of the
model's own weights. Both are named by a number once they have changed.
"""

from typing import TYPE_CHECKING, Any

from vllm.v1.steering.core import prefix_cache

if TYPE_CHECKING:
    from vllm.v1.request import Request

WEIGHT_CALLS = frozenset({"reload_weights", "update_weights", "finish_weight_update"})
"""Methods of workers that change the model's weights."""

_HASHED_AT = "hashed_at"


class Weights:
    """The weights of this process's engine, as block hashes name them.

    A request hashes its first blocks before it reaches a scheduler, on the thread that
    receives it. Only the engine's thread changes this.
    """

    version: int = 0
    """How often the model's weights have changed."""
    loads: dict[str, int] = {}  # noqa: RUF012 - replaced, never changed
    """By adapter, how often it was loaded through `add_lora`."""

    @classmethod
    def begin(cls) -> None:
        """Begin a new engine."""
        cls.version, cls.loads = 0, {}


def extra_keys(request: "Request", start: int, stop: int) -> list[tuple[str, ...]]:
    """The keys that the hash of the block of tokens `[start, stop)` gets."""
    vars(request)[_HASHED_AT] = prefix_cache.EngineSteering.changes
    keys = prefix_cache.extra_keys(request, start, stop)
    if Weights.version:
        keys.append(("weights", str(Weights.version)))
    adapter = request.lora_request
    if adapter is not None and (load := Weights.loads.get(adapter.lora_name, 1)) > 1:
        keys.append(("lora-load", str(load)))
    return keys


def refresh(request: "Request") -> None:
    """Hash a request again that was hashed before the last change."""
    changes = prefix_cache.EngineSteering.changes
    if vars(request).get(_HASHED_AT, changes) != changes:
        request.block_hashes.clear()
        request.update_block_hashes()


def note_weights(scheduler: Any) -> None:
    """Note that the model's weights change before the next step."""
    Weights.version += 1
    prefix_cache.change(scheduler.requests.values(), scheduler.hash_block_size)


def note_adapter(scheduler: Any, name: str) -> None:
    """Note that an adapter is loaded, perhaps again under the same name and path."""
    load = Weights.loads.get(name, 0) + 1
    Weights.loads = {**Weights.loads, name: load}
    if load > 1:
        concerned = (
            request
            for request in scheduler.requests.values()
            if request.lora_request is not None
            and request.lora_request.lora_name == name
        )
        prefix_cache.change(concerned, scheduler.hash_block_size)
